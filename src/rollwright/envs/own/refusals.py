"""What an environment must not do to be stepped by its ``_step`` and ``_reset`` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwright.data.specs import Composite
from rollwright.envs.arrays import refuse_overrides
from rollwright.errors import NotNative

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase

__all__ = ["refuse_more", "specs_of"]

_HERE, _TESTING = "rollwright.", "rollwright.testing."
_SPECS = ("observation", "action", "reward", "done", "state")


def specs_of(env: EnvBase) -> tuple[Composite, ...]:
    """All specs of an environment, the same objects as long as nobody sets others."""
    return tuple(env.full_spec(name) for name in _SPECS)


def refuse_more(env: EnvBase, known: type[EnvBase], *, own: bool) -> None:
    """Test that an environment does no more than to step and to reset.

    Args:
        env: the environment.
        known: the class that steps such environments.
        own: whether it does so by a ``_step`` and a ``_reset`` of its own, not by those of ``known``.

    Raises:
        NotNative: it does, or is one of this library's, whose classes step in other ways.
    """
    kinds = type(env).__mro__[: type(env).__mro__.index(known)] if own else ()
    if any(kind.__module__.startswith(_HERE) and not kind.__module__.startswith(_TESTING) for kind in kinds):
        raise NotNative(f"{type(env).__name__} speaks TensorDict")
    refuse_overrides(env, known, but=("_step", "_reset") if own else ())
    others = {
        "batch_locked=False": not env.batch_locked,
        "stand_ins": env.stand_ins,
        "ends_with_step": env.ends_with_step,
        "read_at_reset": env.read_at_reset,
        "has_token_rewards": env.has_token_rewards,
        "states that are no observations": set(env.state_keys) - set(env.observation_keys),
    }
    for name, is_there in others.items():
        if is_there:
            raise NotNative(f"{type(env).__name__} speaks TensorDict: it has {name}")
