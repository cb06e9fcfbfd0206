"""Environments that are recreated when they fail: how often, with which state; on TensorDicts and on arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, key_str
from rollwright._processes.channel import ByValue
from rollwright._tensors import as_tensor
from rollwright._warnings import warn_user
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.shapes import as_device
from rollwright.envs._results import merge_reset, missing_actions, reset_masks
from rollwright.envs.arrays import (
    ArrayEnv,
    Entry,
    Rows,
    UnfitOutcome,
    Values,
    array_form,
    check_flags,
    check_open,
    refuse_overrides,
)
from rollwright.envs.base import EnvBase, WrapperArrays, WrapperEnv
from rollwright.envs.factories import SPECS, made, renamed
from rollwright.errors import EnvError, NotNative, RollwrightError

Hook = Callable[[EnvBase, EnvBase | None], Any]

FAILURE = ("raise", "recreate")
MAX_FAILURES = 3  # in a row, without a step in between


def check_failure(on_env_failure: Any) -> bool:
    """Test the option; whether environments are recreated.

    Raises:
        ValueError: it is none of :data:`FAILURE`.
    """
    if on_env_failure not in FAILURE:
        raise ValueError(f"on_env_failure: expected one of {FAILURE}, got {on_env_failure!r}.")
    return bool(on_env_failure == "recreate")


class RecreationPolicy:
    """Counts the failures of one environment, and gives its replacement what it had.

    Can be pickled: the replacement may live in another process.

    Attributes:
        seed: given last.
        num_recreated: how many environments were replaced.
        num_recreated_inside: how many were replaced inside of those.
        device: that they were moved to.
        failures: in a row, without a step in between.
        hooks: called with each new environment and the one before it; None in its place: it was lost with its process.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> policy = RecreationPolicy()
        >>> policy.note_seed(0)
        >>> policy.replace(GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1"))
        GymEnv(env=CartPole-v1, batch_size=[], device=None)
        >>> policy.num_recreated
        1
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.num_recreated = self.num_recreated_inside = 0
        self.device: Any = None
        self.failures = 0
        self.hooks: list[Hook] = []
        self._static_seed = False
        self._before = 0  # replaced before the seed was given

    def note_seed(self, seed: int | None, static_seed: bool = False) -> None:
        """Note a seed that the environment was given; the seeds of its replacements are derived from it."""
        self.seed, self._static_seed, self._before = seed, static_seed, self.num_recreated

    def note_failure(self, error: RollwrightError) -> None:
        """Count a failure.

        Raises:
            RollwrightError: it is one too many.
        """
        if self.failures >= MAX_FAILURES:
            raise renamed(f"recreated {MAX_FAILURES} times without a step in between", error) from error
        self.failures += 1

    def note_loss(self) -> None:
        """The environment is lost with its process: another one is to be :meth:`prepare`-d."""
        self.num_recreated += 1
        self.failures = 0

    def prepare(self, env: EnvBase, old: EnvBase | None = None) -> None:
        """Give a replacement what the environment before it had; it gets a seed of its own."""
        if self.device is not None:
            env.to(self.device)
        number = self.num_recreated - self._before
        if self.seed is not None and number:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with torch.random.fork_rng(devices):  # others draw from the global generators
                env.set_seed(_derived(self.seed, number), self._static_seed)
        for hook in self.hooks:
            hook(env, old)

    def replace(
        self, old: EnvBase, maker: Callable[[], EnvBase], check: Callable[[EnvBase], Any] = lambda env: None
    ) -> EnvBase:
        """Close an environment that has failed, and make another, which is closed too if ``check`` raises."""
        _close(old)  # it is broken
        self.num_recreated += 1
        env = maker()
        try:
            env.train(old.training)
            self.prepare(env, old)
            check(env)
        except BaseException:
            _close(env)
            raise
        self.num_recreated_inside += num_recreations(old)
        return env


def _close(env: EnvBase) -> None:
    with contextlib.suppress(Exception):
        env.close(raise_if_closed=False)


def num_recreations(env: EnvBase) -> int:
    """How many environments were recreated in an environment, its parts included."""
    modules: list[Any] = [module for module in env.modules() if hasattr(type(module), "num_recreated")]
    return sum(module.num_recreated for module in modules)


def _derived(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([int(seed) % 2**64, number]).generate_state(1)[0])


class RecreationWarning:
    """Warns of the first environment that is recreated.

    Args:
        counted_in: where all of them are counted.
    """

    def __init__(self, counted_in: str) -> None:
        self._counted_in = counted_in
        self._has_warned = False

    def warn(self, place: str, text: str) -> None:
        """Warn that the environment of ``place`` was recreated, because of ``text``."""
        if self._has_warned:
            return
        self._has_warned = True
        warn_user(
            f"{place} was recreated, and its trajectory ends as truncated: {text.rstrip('.')}. Further ones are "
            f"counted in {self._counted_in} without a warning.",
            RuntimeWarning,
        )


class RecreatedArrays(WrapperArrays):
    """The array form of a :class:`~rollwright.envs.recreation.RecreatedEnv`.

    Raises:
        NotNative: the environment has no array form.
    """

    def __init__(self, env: RecreatedEnv) -> None:
        refuse_overrides(env, type(env))
        check_flags(env)
        super().__init__(array_form(env.base_env, unfit=True))
        self.env, self._of = env, env.base_env
        self._forms: Mapping[NestedKey, Entry] = {}  # of roots

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """Note the forms of all that roots hold, but for what a policy writes; see :attr:`may_be_unfit`."""
        self._forms = forms
        super().see_roots(forms)

    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch."""
        with suppress(EnvError):  # what is broken raises in the next step, which recreates it
            self._form().check()

    def groups(self, number: int) -> list[ArrayEnv]:
        """The batch in ``number`` parts of consecutive rows, each an array form of its own with all of its methods."""
        raise NotNative("on_env_failure='recreate' recreates the batch as a whole")

    def _form(self) -> ArrayEnv:
        """The array form of the environment that is there now."""
        env = self.env.base_env
        if self._of is not env:
            ahead = self._base.resets_ahead
            try:
                self._base = array_form(env, unfit=True)
            except NotNative as reason:
                raise EnvError(
                    f"create_env_fn: it made {env} in the place of one on arrays, and this one is not: {reason}. With "
                    "on_env_failure='recreate', make environments of one kind."
                ) from reason
            self._of, self._base.resets_ahead = env, ahead
            self._base.see_roots(self._forms)
        return self._base

    def step(self, root: Values, preset: Values) -> Values:
        """Act."""
        return self.env.step_with(
            lambda: self._form().step(root, preset), self._missed, lambda: root.keys() >= set(self.reads)
        )

    def _missed(self) -> Values:
        """The outcome of a step that was none."""
        out = self._values(self.env.missed(), {**self.entries, **self.rewards})
        for flag, value in (("done", True), ("terminated", False), ("truncated", True)):
            out[flag] = np.full(self.batch, value)[()]
        return out

    def _values(self, td: TensorDictBase, entries: Mapping[NestedKey, Entry]) -> Values:
        out: Values = {}
        for key, entry in entries.items():
            array = cast(torch.Tensor, td.get(key)).numpy()
            out[key] = array.reshape(array.shape[:-1])[()] if entry.column else array
        return out

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """Begin new trajectories in the environments that ``rows``, bool ``[*batch]``, marks; None: in all."""
        return self._reset(rows, kwargs, lambda form, rows: form.reset(rows, **kwargs))

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """The same where what goes on may be read: ``root``, from which the next step would be taken."""
        return self._reset(rows, kwargs, lambda form, rows: form.reset_from(root, rows, **kwargs))

    def _reset(
        self, rows: Rows | None, kwargs: dict[str, Any], reset: Callable[[ArrayEnv, Rows | None], Values]
    ) -> Values:
        def merge(fresh: TensorDictBase | Values) -> TensorDictBase | Values:
            marks = cast(Rows, rows)
            if isinstance(fresh, TensorDictBase):
                return merge_reset(self.env, self.env.last(), fresh, {(): torch.from_numpy(marks[..., None])})
            merged = self._values(self.env.last(), self.entries)
            for key, value in merged.items():
                value[marks] = fresh[key][marks]
            return merged

        is_partial = rows is not None and not bool(rows.all())
        take = lambda whole: reset(self._form(), None if whole else rows)  # noqa: E731
        return self.env.reset_with(take, merge if is_partial else None, kwargs)


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
