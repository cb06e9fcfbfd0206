"""What environments and transforms of TorchRL change in a frame after the next step's data were taken from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase

from rollwright._foreign import class_path, kind_in, overrides
from rollwright._keys import NestedKey, leaf_keys
from rollwright.errors import EnvError

__all__ = ["only_below_next", "transform_trims", "trim_by", "trims"]

_HOOK = "_post_step_mdp_hooks"


def transform_trims(transform: Any) -> bool:
    """Whether a transform of TorchRL changes frames once the data of the next step were taken from them."""
    return overrides(transform, _HOOK)


def trims(env: Any) -> bool:
    """As :func:`transform_trims`, of an environment of TorchRL and all of its transforms."""
    while "TransformedEnv" in kind_in("torchrl", env):
        if transform_trims(env.transform):
            return True
        env = env.base_env
    return getattr(env, _HOOK, None) is not None


def only_below_next(fake: TensorDictBase) -> list[NestedKey]:
    """Entries that steps return and roots lack, of a :meth:`EnvBase.fake_tensordict`."""
    at_root = set(leaf_keys(fake))
    return [key for key in leaf_keys(fake.get("next")) if key not in at_root]


def trim_by(owner: Any, frame: TensorDictBase, following: TensorDictBase, dropped: Iterable[NestedKey]) -> None:
    """Let an environment or a transform of TorchRL change a frame.

    Args:
        owner: the environment or the transform.
        frame: what a step returned, changed in place.
        following: the data of the next step, changed in place.
        dropped: entries of ``following`` that TorchRL does not carry over to it.

    Raises:
        EnvError: it returned others in their place.
    """
    for key in dropped:
        following.pop(key, None)
    changed, after = getattr(owner, _HOOK)(frame, following)
    if changed is not frame or after is not following:
        raise EnvError(
            f"{class_path(owner)}: expected {_HOOK} to return the TensorDicts that it is given, got others. Change "
            "them in place."
        )
