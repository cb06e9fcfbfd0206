"""The tensor form of a TransformedEnv: its transforms, on the tensors of its base."""

from __future__ import annotations

from functools import partial
from operator import is_not
from typing import TYPE_CHECKING, Any, cast

from tensordict import TensorDict, TensorDictBase
from torch import zeros

from rollwright._keys import leaf_keys
from rollwright.envs.arrays import UnfitOutcome, check_open, named_error
from rollwright.envs.on_arrays.columns import TensorKind
from rollwright.envs.own.tensors import OwnTensors, Tensors
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.compose import Compose
from rollwright.errors import NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.transforms.transformed_env import TransformedEnv


def parts_of(transform: Transform) -> list[Transform]:
    """A transform, or those of a chain, in order."""
    if type(transform) is Compose:
        return [part for child in transform for part in parts_of(child)]
    return [transform]


def check_parts(env: TransformedEnv, parts: list[Transform]) -> None:
    """Test that the transforms of an environment are those that its form was made of.

    Raises:
        NotNative: they are others.
    """
    now = parts_of(env.transform)
    if len(now) != len(parts) or any(map(is_not, now, parts)):
        raise NotNative("its transforms have changed")


class TransformedTensors(OwnTensors):
    """The tensor form of a :class:`TransformedEnv`.

    Transforms of this library change the tensors. Where others are among them, all are given TensorDicts of these, of
    copies where the base writes again into what it returned.

    Raises:
        NotNative: the base has none, or a transform does more than change what steps and resets return.
    """

    def __init__(self, env: TransformedEnv, known: type[TransformedEnv]) -> None:
        self._parts = parts = parts_of(env.transform)
        if trims := [type(part).__name__ for part in parts if part.has_own("trim_frame")]:
            raise NotNative(f"{trims[0]} changes frames after the step")
        if not env.cache_specs:
            raise NotNative("cache_specs=False")
        if any(not getattr(part, "update_done", True) for part in parts):
            raise NotNative("its flags may be set without 'done'")
        self._base = base = env.base_env._tensor_form()
        self._on_columns = all(part.works_on_columns for part in parts)
        by_mask = base.by_mask and all(
            part.resets_by_mask and not part.has_own("_reset", "transform_reset") for part in parts
        )
        super().__init__(
            env,
            known,
            self._step_tensordict,
            self._reset_tensordict,
            check=self._check_parts,
            check_batch=base.check_batch,
            after_step=partial(self._reset_tensordict, after_step=True),
            by_mask=by_mask,
            is_live=base.is_live and self._on_columns,
            goes_on=base.goes_on,
        )
        self._kind = TensorKind(self.tensordict({}), lambda: env.base_env.ndim)
        self._passed = [*env.base_env.reset_keys, *env.base_env.state_keys, *env.base_env.read_at_reset]
        self._transform: Transform = env.transform
        self._inverts = env.transform.inverts
        self._taken: tuple[Any, Any] | None = None  # what the base was given, and what it returned that does not fit
        self._ends_there = False  # whether the base has ended what ended with the last step

    def _check_parts(self) -> None:
        self._base.check()
        check_parts(cast("TransformedEnv", self._env), self._parts)

    def _as_tensordict(self, values: Tensors) -> TensorDict:
        if self._base.is_live:
            values = {key: value.clone() for key, value in values.items()}
        return self._base.tensordict(values)

    def step(self, td: TensorDict) -> Tensors:
        """See :meth:`OwnTensors.step`."""
        if not self._on_columns:
            return super().step(td)
        if self._env.is_closed:
            check_open(self._env, "step")
        try:
            given: Any = self._transform.inv(td) if self._inverts else td
            try:
                out = self._base.step(given)
            except UnfitOutcome as found:
                self._taken = given, found.outcome
                return super().step(td)
            ended = out["done"]
            preset = td.get("next", None)
            if preset is not None:  # recurrent states that the policy wrote: transforms must see them
                out = {**{key: preset.get(key) for key in leaf_keys(preset)}, **out}
            for part in self._parts:
                part._change(self._kind, given, out)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "step", error) from error
        self._ends_there = out["done"] is ended
        return out

    def _step_tensordict(self, td: TensorDict) -> TensorDictBase:
        """See :meth:`TransformedEnv._step`."""
        if self._taken is None:
            given: Any = self._transform.inv(td) if self._inverts else td
            try:
                outcome: Any = self._as_tensordict(self._base.step(given))
            except UnfitOutcome as found:
                outcome = found.outcome
        else:
            (given, outcome), self._taken = self._taken, None
        preset = td.get("next", None)
        if preset is not None:
            outcome.update(preset.exclude(*leaf_keys(outcome)))
        ended = outcome.get("done")
        changed = self._transform.transform_step(given, outcome)
        self._ends_there = changed.get("done", None) is ended
        return changed

    def reset(self, td: TensorDictBase | None, *, after_step: bool = False, **kwargs: Any) -> Tensors:
        """See :meth:`OwnTensors.reset`."""
        if not self._on_columns:
            return super().reset(td, after_step=after_step, **kwargs)
        check_open(self._env, "reset")
        try:
            fresh = self._base.reset(self._passed_on(td), after_step=after_step and self._ends_there, **kwargs)
        except UnfitOutcome as found:
            self._taken = None, found.outcome
            return super().reset(td)
        try:
            for part in self._parts:
                part._begin(self._kind, {} if td is None else td, fresh)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "reset", error) from error
        for key, (shape, dtype) in self.flags.items():
            if key not in fresh:
                fresh[key] = zeros(shape, dtype=dtype, device=self.device)
        return fresh

    def _reset_tensordict(
        self, td: TensorDictBase | None, *, after_step: bool = False, **kwargs: Any
    ) -> TensorDictBase | None:
        """See :meth:`TransformedEnv._reset`."""
        flags: Tensors = {}
        if self._taken is None:
            td, flags = self._transform.transform_reset_input(td), self._base.no_flags()
            after_step = after_step and self._ends_there
            try:
                fresh: Any = self._base.reset(self._passed_on(td), after_step=after_step, **kwargs)
                fresh = self._as_tensordict({**fresh, **flags})
            except UnfitOutcome as found:
                fresh = found.outcome
        else:
            (_, fresh), self._taken = self._taken, None
        given_flags = {key: fresh.get(key) for key in flags}
        changed = self._transform.transform_reset(fresh.empty() if td is None else td, fresh)
        if changed is not None and not changed.is_locked:  # those that nobody has changed need not be looked at
            unchanged = [key for key, flag in given_flags.items() if changed.get(key, None) is flag]
            changed = changed.exclude(*unchanged)
        return changed

    def _passed_on(self, td: TensorDictBase | None) -> TensorDictBase | None:
        """What the base's reset is given."""
        return None if td is None else td.select(*self._passed, strict=False)
