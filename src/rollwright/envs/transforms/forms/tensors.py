"""The tensor form of a TransformedEnv: its transforms, called on TensorDicts over the tensors of its base."""

from __future__ import annotations

from operator import is_not
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from rollwright._keys import leaf_keys
from rollwright.envs.arrays import UnfitOutcome
from rollwright.envs.own.tensors import OwnTensors
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.compose import Compose
from rollwright.errors import NotNative

if TYPE_CHECKING:
    from rollwright.envs.transforms.transformed_env import TransformedEnv

__all__ = ["parts_of", "transformed_tensors"]

#: Transforms whose ``_reset`` changes nothing where no row is marked, nor in themselves.
_BY_MASK = {"CatFrames", "CatTensors", "ExcludeTransform", "InitTracker", "RenameTransform", "RewardSum"}
_BY_MASK |= {"SelectTransform", "StepCounter"}


def parts_of(transform: Transform) -> list[Transform]:
    """A transform, or those of a chain, in order."""
    if type(transform) is Compose:
        return [part for child in transform for part in parts_of(child)]
    return [transform]


def transformed_tensors(env: TransformedEnv, known: type[TransformedEnv]) -> OwnTensors:
    """The tensor form of a :class:`TransformedEnv`; what its base returns is copied where transforms may write into it.

    Raises:
        NotNative: the base has none, or a transform does more than change what steps and resets return.
    """
    parts = parts_of(env.transform)
    if trims := [type(part).__name__ for part in parts if type(part).trim_frame is not Transform.trim_frame]:
        raise NotNative(f"{trims[0]} changes frames after the step")
    if not env.cache_specs:
        raise NotNative("cache_specs=False")
    if any(not getattr(part, "update_done", True) for part in parts):
        raise NotNative("its flags may be set without 'done'")
    base = env.base_env._tensor_form()
    chain = _Chain(env, base, parts)
    by_mask = all(type(part)._reset is Transform._reset or type(part).__name__ in _BY_MASK for part in parts)
    return OwnTensors(
        env,
        known,
        chain.step,
        chain.reset,
        check=chain.check,
        check_batch=base.check_batch,
        after_step=chain.reset_after_step,
        by_mask=base.by_mask and by_mask,
        goes_on=base.goes_on,
    )


class _Chain:
    """``_step`` and ``_reset`` of a TransformedEnv over the tensor form of its base."""

    def __init__(self, env: TransformedEnv, base: OwnTensors, parts: list[Transform]) -> None:
        self._env, self._base, self._parts = env, base, parts
        self._passed = [*env.base_env.reset_keys, *env.base_env.state_keys, *env.base_env.read_at_reset]
        self._inverts = env.transform.inverts
        self._copies = base.is_live
        self._ends_there = False  # whether the base has ended what ended with the last step

    def check(self) -> None:
        """See :meth:`OwnTensors.check`."""
        self._base.check()
        now = parts_of(self._env.transform)
        if len(now) != len(self._parts) or any(map(is_not, now, self._parts)):
            raise NotNative("its transforms have changed")

    def _as_tensordict(self, values: dict[Any, Any]) -> TensorDictBase:
        if self._copies:
            values = {key: value.clone() for key, value in values.items()}
        return self._base.tensordict(values)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """See :meth:`TransformedEnv._step`."""
        transform = self._env.transform
        given: Any = transform.inv(td) if self._inverts else td
        try:
            outcome = self._as_tensordict(self._base.step(given))
        except UnfitOutcome as found:
            outcome = found.outcome
        preset = td.get("next", None)
        if preset is not None:  # recurrent states that the policy wrote: transforms must see them
            outcome.update(preset.exclude(*leaf_keys(outcome)))
        ended = outcome.get("done")
        changed = transform.transform_step(given, outcome)
        self._ends_there = changed.get("done", None) is ended
        return changed

    def reset_after_step(self, td: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        """The same where what is marked has ended with the last step."""
        return self.reset(td, after_step=self._ends_there, **kwargs)

    def reset(self, td: TensorDictBase | None, *, after_step: bool = False, **kwargs: Any) -> TensorDictBase:
        """See :meth:`TransformedEnv._reset`."""
        transform = self._env.transform
        td = transform.transform_reset_input(td)
        given = None if td is None else td.select(*self._passed, strict=False)
        flags = self._base.no_flags()
        try:
            fresh = self._as_tensordict({**self._base.reset(given, after_step=after_step, **kwargs), **flags})
        except UnfitOutcome as found:
            fresh = found.outcome
        given_flags = {key: fresh.get(key) for key in flags}
        changed = transform.transform_reset(fresh.empty() if td is None else td, fresh)
        if changed is not None and not changed.is_locked:  # those that nobody has changed need not be looked at
            unchanged = [key for key, flag in given_flags.items() if changed.get(key, None) is flag]
            changed = changed.exclude(*unchanged)
        return changed
