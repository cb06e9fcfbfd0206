"""Primer transforms for the recurrent states of modules.

Modules know nothing of environments. What they announce are specs; :mod:`rollwright.envs` registers the transform that
is made of them, and has those that put several together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from rollwright._keys import NestedKey
from rollwright._warnings import warn_user
from rollwright.data.layout import IS_INIT
from rollwright.data.specs import TensorSpec

if TYPE_CHECKING:
    from rollwright.envs.transforms import TensorDictPrimer, Transform

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


def get_primers_from_module(module: Any, warn: bool = True, strict: bool = True) -> Transform | None:
    """The primers of all recurrent modules in a policy, for an environment that is made without ``policy=``.

    Args:
        module: the policy; its submodules with a method ``make_tensordict_primer()`` have one each.
        warn: warn where there is none.
        strict: False: where a submodule cannot make its primer, warn and go on with the others.

    Returns:
        The primer; a ``Compose`` of several; None where there is none.

    Example:
        >>> from tensordict.nn import TensorDictSequential
        >>> from rollwright.modules import GRUModule
        >>> policy = TensorDictSequential(GRUModule(4, 8, in_key="observation", out_key="features"))
        >>> list(get_primers_from_module(policy).primers.keys())
        ['recurrent_state']
    """
    primers, failed = [], {}
    for part in _with_primers(module):
        try:
            primers.append(part.make_tensordict_primer())
        except Exception as error:
            if strict:
                raise
            failed[type(part).__name__] = error
    if failed:
        warn_user(f"module: no primers of {failed}. Append them to the environment yourself.")
    elif warn and not primers:
        warn_user(
            f"module: {type(module).__name__} has no part with a method make_tensordict_primer(), so the environment "
            "needs no primer. Leave it out, or pass warn=False.",
        )
    if len(primers) < 2:
        return primers[0] if primers else None
    composed: Transform = importlib.import_module("rollwright.envs").Compose(*primers)
    return composed


def get_env_transforms_from_module(module: Any, init_key: str = IS_INIT) -> Transform:
    """All transforms that a recurrent policy needs: an ``InitTracker``, and its primers behind it.

    ``policy=`` of an environment, and every collector, add them by themselves.

    Args:
        module: the policy.
        init_key: where the mark of first steps is written.

    Example:
        >>> from rollwright.modules import GRUModule
        >>> len(get_env_transforms_from_module(GRUModule(4, 8, in_key="observation", out_key="features")))
        2
    """
    envs = importlib.import_module("rollwright.envs")
    tracker: Transform = envs.InitTracker(init_key=init_key)
    primers = get_primers_from_module(module, warn=False)
    composed: Transform = tracker if primers is None else envs.Compose(tracker, primers)
    return composed


def _with_primers(module: Any) -> list[Any]:
    """The parts that have a primer, without those inside of one that speaks for them."""
    parts = dict(module.named_modules()) if isinstance(module, nn.Module) else {"": module}
    found: dict[str, Any] = {}
    for path, part in parts.items():
        outer = any(not other or path.startswith(f"{other}.") for other in found)
        if not outer and callable(getattr(part, "make_tensordict_primer", None)):
            found[path] = part
    return list(found.values())
