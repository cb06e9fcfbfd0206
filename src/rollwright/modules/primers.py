"""Primer transforms for the recurrent states of modules.

Modules know nothing of environments. What they announce are specs; :mod:`rollwright.envs` registers the transform that
is made of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollwright._keys import NestedKey
from rollwright.data.specs import TensorSpec

if TYPE_CHECKING:
    from rollwright.envs.transforms import TensorDictPrimer

__all__ = ["make_primer", "register_primer"]

_factories: list[Callable[..., Any]] = []


def register_primer(factory: Callable[..., Any]) -> None:
    """Let :func:`make_primer` call ``factory``, the class of primers."""
    _factories[:] = [factory]


def make_primer(specs: Mapping[NestedKey, TensorSpec]) -> TensorDictPrimer:
    """A primer for entries of one environment, zeros at each reset."""
    if not _factories:
        importlib.import_module("rollwright.envs")  # which registers it; this package does not depend on that one
    primer: TensorDictPrimer = _factories[0](specs, expand_specs=True)
    return primer
