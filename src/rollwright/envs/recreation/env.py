"""RecreatedEnv: an environment that is recreated when it raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar, cast

import torch
from tensordict import TensorDictBase

from rollwright._keys import key_str
from rollwright._processes.channel import ByValue
from rollwright._tensors import as_tensor
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.shapes import as_device
from rollwright.envs._checks import missing_actions
from rollwright.envs._partial_reset import merge_reset, reset_masks
from rollwright.envs.arrays import ArrayEnv, UnfitOutcome, Values, check_open
from rollwright.envs.base import EnvBase
from rollwright.envs.factories import SPECS, made
from rollwright.envs.recreation.arrays import RecreatedArrays
from rollwright.envs.recreation.policy import RecreationPolicy
from rollwright.envs.wrapper import WrapperEnv
from rollwright.errors import EnvError, RollwrightError

T = TypeVar("T")


class RecreatedEnv(WrapperEnv):
    """An environment around another one, ``base_env``, which is replaced by a new one when it raises.

    A step that raised is answered by the last observation once more, a reward of 0, and ``truncated`` and ``done`` set
    in all of the batch, so that trajectories end there. In place of a reset that raised, the new environment's is
    returned; where it was a partial one, the next step ends the trajectories that the old environment had in progress.
    Data pass through as they are, specs and attributes are those of ``base_env``, and so are the names in
    ``state_dict()``.

    Args:
        env: the first one.
        maker: makes others of the same make.
        worker: its index in a batch, None for one alone.
        report: called each time that another one has been made, with the reason.

    Attributes:
        recreation: the policy: counts failures, and decides what the next environment takes over.
        awaits_reset: whether all of the batch waits for a reset, so that nothing is stepped.
        last_observed: the outcome of the last step or reset, a TensorDict or arrays.

    Raises:
        ValueError: the environment cannot mark a trajectory as cut.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> make = lambda: GymEnv("CartPole-v1")
        >>> env = RecreatedEnv(make(), make, None, print)
        >>> env.rollout(3).batch_size, env.recreations
        (torch.Size([3]), 0)
    """

    _not_saved = ("_maker", "_report")

    def __init__(
        self, env: EnvBase, maker: Callable[[], EnvBase], worker: int | None, report: Callable[[str], Any]
    ) -> None:
        env.add_truncated_keys()
        if alone := [group.done for group in env.done_groups if group.truncated is None]:
            raise ValueError(
                f"on_env_failure='recreate': {env} ends trajectories by {key_str(alone)}, which cannot tell a cut from "
                "an end. Name the environment's flag 'done', or leave on_env_failure out."
            )
        super().__init__(env)
        self._maker = ByValue(maker)
        self._worker = worker
        self._report = report
        self.recreation = RecreationPolicy()
        self.awaits_reset = False
        self.last_observed: TensorDictBase | Values | None = None
        self._owes_end = False  # whether trajectories are in progress that no environment goes on with

    @property
    def recreations(self) -> int:
        """How many environments were here before."""
        return self.recreation.num_recreated

    @property
    def num_recreated(self) -> int:
        """How many environments were replaced, those inside of them included."""
        return self.recreation.num_recreated + self.recreation.num_recreated_inside

    def continue_from(self, recreation: RecreationPolicy | None, report: Callable[[str], Any]) -> None:
        """Run in another process, and take the place of what was there before, if anything was."""
        self._report = report
        if recreation is not None:
            self.recreation = recreation
            self.to(recreation.device)
            recreation.prepare(self.base_env)

    def on_recreation(self, hook: Callable[[EnvBase, EnvBase | None], Any]) -> None:
        """Call ``hook`` with each environment that follows, and the one before it; None: it was lost."""
        if hook not in self.recreation.hooks:
            self.recreation.hooks.append(hook)

    # Failures, in steps and resets of either form -----------------------------------------------

    def recreate(self, error: RollwrightError) -> None:
        """Make another environment in the place of the one that has raised.

        Raises:
            RollwrightError: others before it have failed since the last step, or none can be made.
        """
        self.recreation.note_failure(error)
        self.awaits_reset = True
        self._replace()
        self._report(str(error))

    def _replace(self) -> None:
        old = self.base_env
        check = partial(_check_fits, old=old, facts=_facts(old))
        self.base_env = self.recreation.replace(old, lambda: made(self._worker, self._maker.value), check)

    def step_with(self, step: Callable[[], T], missed: Callable[[], T], acts: Callable[[], bool]) -> T:
        """What a step returns; of one that failed, or that waits for a reset, the end of its trajectory.

        Args:
            step: steps the environment.
            missed: returns the outcome of a step that was none.
            acts: whether there are actions for it.
        """
        check_open(self, "step")
        if not self.awaits_reset:
            try:
                outcome: Any = step()
            except UnfitOutcome as found:
                self._note_step(found.outcome)
                raise
            except RollwrightError as error:
                if self.last_observed is None or not acts():
                    raise
                self.recreate(error)
            else:
                self._note_step(outcome)
                return cast(T, outcome)
        self._owes_end = False
        return missed()

    def _note_step(self, outcome: TensorDictBase | Values) -> None:
        self.recreation.failures, self.last_observed = 0, outcome.copy()

    def reset_with(
        self, reset: Callable[[bool], T], merge: Callable[[Any], TensorDictBase | Values] | None, kwargs: dict[str, Any]
    ) -> T:
        """What a reset returns, of another environment where it fails.

        Args:
            reset: resets: all of the batch if its argument is True, else what is marked.
            merge: returns the last observation with what a partial reset returns; None: all of the batch is marked.
            kwargs: of the reset; a seed is taken out of it when it was used.
        """
        check_open(self, "reset")
        if isinstance(seed := kwargs.get("seed"), int):
            self.recreation.note_seed(seed)
        if self.base_env.is_closed:  # making it has failed the last time
            self._replace()
        replaced, unfit = False, None
        while True:
            try:
                fresh: Any = reset(self.awaits_reset)
            except UnfitOutcome as found:
                fresh, unfit = found.outcome, found
            except RollwrightError as error:
                self.recreate(error)
                replaced = True
                kwargs.pop("seed", None)  # the new one has a seed of its own
                continue
            break
        self.awaits_reset = self._owes_end = (self._owes_end or replaced) and merge is not None
        self.last_observed = fresh.copy() if merge is None or self.last_observed is None else merge(fresh)
        if unfit is not None:
            raise unfit
        return cast(T, fresh)

    # On TensorDicts -----------------------------------------------------------------------------

    def step_outcome(self, tensordict: TensorDictBase) -> TensorDictBase:
        """See :meth:`EnvBase.step_outcome`; of a step that failed, the end of its trajectory."""
        step = partial(self.base_env.step_outcome, tensordict)
        return self.step_with(step, self.missed, lambda: not missing_actions(self, tensordict))

    def last(self) -> TensorDictBase:
        """The last observation, in tensors of its own."""
        last = self.last_observed
        if isinstance(last, TensorDictBase):
            return last.clone()
        td = self.full_observation_spec.zero()
        for key in self.observation_keys:
            spec = self.full_observation_spec[key]
            td.set(key, as_tensor((last or {})[key]).to(spec.dtype).reshape(spec.shape).clone())
        return td

    def missed(self) -> TensorDictBase:
        """The outcome of a step that was none."""
        flags = self.full_done_spec.zero()
        for group in self.done_groups:
            for flag in (group.done, group.truncated):
                if flag is not None:
                    flags.set(flag, torch.ones_like(flags.get(flag)))
        return self.last().update(self.full_reward_spec.zero()).update(flags)

    def reset_outcome(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        """See :meth:`EnvBase.reset_outcome`; of another environment where the reset fails."""
        masks = reset_masks(self, tensordict)
        is_partial = masks is not None and not all(bool(mask.all()) for mask in masks.values())

        def reset(whole: bool) -> TensorDictBase:
            given = tensordict.exclude(*self.reset_keys) if tensordict is not None and whole else tensordict
            return self.base_env.reset_outcome(given, **kwargs)

        def merge(fresh: TensorDictBase) -> TensorDictBase:
            return merge_reset(self, self.last(), fresh, masks)

        return self.reset_with(reset, merge if is_partial else None, kwargs)

    def _array_form(self) -> ArrayEnv:
        return RecreatedArrays(self)

    # What belongs to the base environment -----------------------------------------------------

    def full_spec(self, name: str) -> Composite:
        """That of the base environment."""
        return self.base_env.full_spec(name)

    def set_full_spec(self, name: str, spec: TensorSpec) -> None:
        """An error: specs are those of each environment that is made."""
        raise AttributeError(f"{name}_spec: {self} recreates environments. Let create_env_fn set their specs.")

    def add_truncated_keys(self) -> Self:
        """No effect: all groups of flags have one."""
        return self

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """That of the base environment."""
        return self.base_env.rand_action(tensordict)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the base environment, see :meth:`EnvBase.set_seed`; those that follow it get seeds made of this one."""
        self.recreation.note_seed(seed, static_seed)
        return self.base_env.set_seed(seed, static_seed)

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move the base environment, and those that will follow it; returns this environment."""
        if device is not None:
            self.recreation.device = as_device(device)
            self.base_env.to(device)
            self._cache.clear()
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the base environment."""
        super().close(raise_if_closed=raise_if_closed)
        self.base_env.close(raise_if_closed=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the base environment."""
        return self.base_env.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}base_env.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_env!r})"


def _facts(env: EnvBase) -> dict[Any, Any]:
    """What an environment and its replacement have in common."""
    facts: dict[Any, Any] = {"batch_size": env.batch_size}
    for name in SPECS:
        for key, spec in env.full_spec(name).leaves().items():
            facts[key] = spec.shape, spec.dtype
    return facts


def _check_fits(new: EnvBase, *, old: EnvBase, facts: dict[Any, Any]) -> None:
    """Test that an environment may take the place of another one, of which these are the facts."""
    if new is old:
        raise EnvError(
            f"create_env_fn: it returned {old}, which has failed and was closed, once more. With "
            "on_env_failure='recreate', let it make another environment at each call."
        )
    new.add_truncated_keys()
    if (now := _facts(new)) != facts:
        differs = sorted(str(key) for key in now.keys() | facts.keys() if now.get(key) != facts.get(key))
        raise EnvError(
            f"create_env_fn: it made {new} in the place of {old}, which differs in {', '.join(differs)}. With "
            "on_env_failure='recreate', make environments of one kind."
        )
