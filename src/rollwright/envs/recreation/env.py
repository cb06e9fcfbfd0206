"""RenewableEnv: an environment that is made anew when it raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from rollwright._keys import key_str
from rollwright._processes.channel import ByValue
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.shapes import as_device
from rollwright.envs._checks import missing_actions
from rollwright.envs._partial_reset import merge_reset, reset_masks
from rollwright.envs.arrays import ArrayEnv, Values, check_open
from rollwright.envs.base import EnvBase
from rollwright.envs.factories import SPECS, made, renamed
from rollwright.envs.recreation.arrays import RenewableArrays
from rollwright.envs.recreation.policy import MOST_FRUITLESS, Rite, Succession
from rollwright.errors import EnvError, RollwrightError

__all__ = ["RenewableEnv"]


class RenewableEnv(EnvBase):
    """An environment around another one, ``base_env``, in whose place a new one is made when it raises.

    A step that raised is answered by the last observation once more, a reward of 0, and ``truncated`` and ``done`` set
    in all of the batch, so that trajectories end there. In place of a reset that raised, the new environment's is
    returned; where it was a partial one, the next step ends the trajectories that the old environment had under way.
    Data pass through as they are, specs and attributes are those of ``base_env``, and so are the names in
    ``state_dict()``.

    Args:
        env: the first one.
        maker: makes others of the same make.
        worker: its index in a batch, None for one alone.
        tell: called each time that another one has been made, with the reason.

    Raises:
        ValueError: the environment cannot say that a trajectory was cut.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> make = lambda: GymEnv("CartPole-v1")
        >>> env = RenewableEnv(make(), make, None, print)
        >>> env.rollout(3).batch_size, env.recreations
        (torch.Size([3]), 0)
    """

    base_env: EnvBase
    _not_saved = ("_maker", "_tell")

    def __init__(
        self, env: EnvBase, maker: Callable[[], EnvBase], worker: int | None, tell: Callable[[str], Any]
    ) -> None:
        self.__dict__["base_env"] = env  # for the constructor, which sets what belongs to it
        env.add_truncated_keys()
        if alone := [group.done for group in env.done_groups if group.truncated is None]:
            raise ValueError(
                f"on_env_failure='recreate': {env} ends trajectories by {key_str(alone)}, which cannot tell a cut from "
                "an end. Name the environment's flag 'done', or leave on_env_failure out."
            )
        super().__init__(
            device=env.device,
            batch_size=env.batch_size,
            run_type_checks=env.run_type_checks,
            allow_done_after_reset=env.allow_done_after_reset,
        )
        self._maker = ByValue(maker)
        self._worker = worker
        self._tell = tell
        self._past = Succession()
        self._is_new = False  # whether all of the batch waits for a reset, and steps are none
        self._owes_end = False  # whether trajectories are under way that no environment goes on with
        self._last: TensorDictBase | Values | None = None  # observed last, of both forms
        self._take(env)

    def _finalize(self) -> None:
        """Specs are those of the base environment."""

    def _take(self, env: EnvBase) -> None:
        self.base_env = env
        self.__dict__["base_env"] = env  # as in TransformedEnv
        self._cache.clear()

    @property
    def recreations(self) -> int:
        """How many environments were here before."""
        return self._past.renewals

    @property
    def _num_recreated(self) -> int:
        return self._past.renewals + self._past.renewals_inside

    def _take_over(self, past: Succession | None, tell: Callable[[str], Any]) -> None:
        """Take a place in another process, and ``past``, where there was an environment before."""
        self._tell = tell
        if past is not None:
            self._past = past
            self.to(past.device)
            past.settle_in(self.base_env)

    def _hand_on(self, rite: Rite) -> None:
        """Let something be done to all environments that follow, see :class:`Succession`."""
        if rite not in self._past.rites:
            self._past.rites.append(rite)

    # Failures ---------------------------------------------------------------------------------

    def _renew(self, error: RollwrightError) -> None:
        """Make another environment in the place of the one that has raised.

        Raises:
            RollwrightError: others before it have failed since the last step, or there is none to be had.
        """
        past = self._past
        if past.fruitless >= MOST_FRUITLESS:
            raise renamed(f"made anew {MOST_FRUITLESS} times without a step in between", error) from error
        past.fruitless += 1
        self._is_new = True
        self._make()
        self._tell(str(error))

    def _make(self) -> None:
        old = self.base_env
        check = partial(_check_follows, old=old, facts=_facts(old))
        self._take(self._past.follow(old, lambda: made(self._worker, self._maker.value), check))

    def _taken(self, last: TensorDictBase | Values) -> None:
        """Note a step."""
        self._past.fruitless = 0
        self._last = last

    def _has_begun(self, *, renewed: bool, partial: bool) -> None:
        """Note a reset."""
        self._is_new = self._owes_end = (self._owes_end or renewed) and partial

    # Steps and resets -------------------------------------------------------------------------

    def step_outcome(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_open(self, "step")
        if not self._is_new:
            try:
                outcome = self.base_env.step_outcome(tensordict)
            except RollwrightError as error:
                if self._last is None or missing_actions(self, tensordict):
                    raise
                self._renew(error)
            else:
                self._taken(outcome.copy())
                return outcome
        self._owes_end = False
        return self._missed()

    def _missed(self) -> TensorDictBase:
        """The outcome of a step that was none."""
        last = self._last
        if isinstance(last, TensorDictBase):
            td = last.clone()
        else:
            td = self.full_observation_spec.zero()
            for key in self.observation_keys:
                spec = self.full_observation_spec[key]
                td.set(key, torch.as_tensor((last or {})[key]).to(spec.dtype).reshape(spec.shape).clone())
        flags = self.full_done_spec.zero()
        for group in self.done_groups:
            for flag in (group.done, group.truncated):
                if flag is not None:
                    flags.set(flag, torch.ones_like(flags.get(flag)))
        return td.update(self.full_reward_spec.zero()).update(flags)

    def reset_outcome(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        check_open(self, "reset")
        masks = reset_masks(self, tensordict)
        partial = masks is not None and not all(bool(mask.all()) for mask in masks.values())

        def begin(whole: bool) -> TensorDictBase:
            given = tensordict.exclude(*self.reset_keys) if tensordict is not None and whole else tensordict
            return self.base_env.reset_outcome(given, **kwargs)

        fresh: TensorDictBase = self._begun(begin, partial, kwargs)
        last = self._last
        if partial and isinstance(last, TensorDictBase):
            self._last = merge_reset(self, last, fresh, masks)
        else:
            self._last = fresh.copy()
        return fresh

    def _begun(self, begin: Callable[[bool], Any], partial: bool, kwargs: dict[str, Any]) -> Any:
        """What a reset returns, of another environment where it fails.

        Args:
            begin: resets: all of the batch if its argument is True, else what is marked.
            partial: whether not all of the batch is marked.
            kwargs: of the reset; a seed is taken out of it when it was used.
        """
        if isinstance(seed := kwargs.get("seed"), int):
            self._past.note_seed(seed)
        if self.base_env.is_closed:  # making it has failed the last time
            self._make()
        renewed = False
        while True:
            try:
                fresh = begin(self._is_new)
            except RollwrightError as error:
                self._renew(error)
                renewed = True
                kwargs.pop("seed", None)  # the new one has a seed of its own
            else:
                self._has_begun(renewed=renewed, partial=partial)
                return fresh

    def _array_form(self) -> ArrayEnv:
        return RenewableArrays(self)

    # What belongs to the base environment -----------------------------------------------------

    def _full_spec(self, name: str) -> Composite:
        return self.base_env._full_spec(name)

    def _set_spec(self, name: str, spec: TensorSpec, default_key: str | None) -> None:
        raise AttributeError(f"{name}_spec: {self} makes environments anew. Let create_env_fn set their specs.")

    def add_truncated_keys(self) -> Self:
        """No effect: all groups of flags have one."""
        return self

    @property
    def batch_locked(self) -> bool:  # type: ignore[override]
        """As for the base environment."""
        return self.base_env.batch_locked

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """That of the base environment."""
        return self.base_env.rand_action(tensordict)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the base environment, see :meth:`EnvBase.set_seed`; those that follow it get seeds made of this one."""
        self._past.note_seed(seed, static_seed)
        return self.base_env.set_seed(seed, static_seed)

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move the base environment, and those that will follow it; returns this environment."""
        if device is not None:
            self._past.device = as_device(device)
            self.base_env.to(device)
            super().to(device)
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the base environment. A second call raises unless ``raise_if_closed=False``."""
        super().close(raise_if_closed=raise_if_closed)
        self.base_env.close(raise_if_closed=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the base environment."""
        return self.base_env.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}base_env.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            base_env = self.__dict__.get("base_env")
            if base_env is None or name.startswith("__") or hasattr(type(self), name):
                raise
        return getattr(base_env, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.base_env!r})"


def _facts(env: EnvBase) -> dict[Any, Any]:
    """What environments that follow one another have in common."""
    facts: dict[Any, Any] = {"batch_size": env.batch_size}
    for name in SPECS:
        for key, spec in getattr(env, f"full_{name}_spec").items(True, False):
            if not isinstance(spec, Composite):
                facts[key] = spec.shape, spec.dtype
    return facts


def _check_follows(new: EnvBase, *, old: EnvBase, facts: dict[Any, Any]) -> None:
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
