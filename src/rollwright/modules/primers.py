"""The transform that carries a module's states through an environment, made by the package of environments.

Modules know nothing of environments. What they announce are specs; :mod:`rollwright.envs` registers the transform that
is made of them.
"""

from __future__ import annotations

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
    """A primer for entries of one environment, zeros at each reset.

    Raises:
        RuntimeError: no environments have been imported.
    """
    if not _factories:
        raise RuntimeError(
            "make_tensordict_primer: primers are transforms of environments. Import rollwright.envs first."
        )
    primer: TensorDictPrimer = _factories[0](specs, expand_specs=True)
    return primer
