"""Transforms, under the names and at the path that programs of the field import."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rollwright.data.specs import Composite
from rollwright.envs.transforms import *  # noqa: F403 - all of its __all__
from rollwright.envs.transforms import Transform
from rollwright.envs.transforms import __all__ as __all__
from rollwright.envs.transforms.base import map_spec

_ChangeOfSpec = Callable[[Any, Any], Any]


def _apply_to_composite(function: _ChangeOfSpec) -> _ChangeOfSpec:
    """Let a method that changes the spec of one entry change a Composite: ``out_key`` gets that of ``in_key``."""

    @functools.wraps(function)
    def change(self: Transform, spec: Any) -> Any:
        if not isinstance(spec, Composite):
            return function(self, spec)
        pairs = zip(self.in_keys, self.out_keys, strict=True)
        return map_spec(spec, pairs, lambda leaf: function(self, leaf))

    return change


def _apply_to_composite_inv(function: _ChangeOfSpec) -> _ChangeOfSpec:
    """The same for what goes to the environment: ``out_key_inv`` takes the place of ``in_key_inv``."""

    @functools.wraps(function)
    def change(self: Transform, spec: Any) -> Any:
        if not isinstance(spec, Composite):
            return function(self, spec)
        pairs = zip(self.in_keys_inv, self.out_keys_inv, strict=True)
        return map_spec(spec, pairs, lambda leaf: function(self, leaf), move=True)

    return change
