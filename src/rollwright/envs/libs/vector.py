"""Vector environments of gymnasium: resets on request, whatever their autoreset mode, and parts of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward
from numpy.typing import NDArray

from rollwright._foreign import class_path
from rollwright.envs.arrays import Rows, Values
from rollwright.errors import EnvError


class InTurn(VectorEnv[Any, Any, Any]):
    """Steps what a ``SyncVectorEnv`` holds without its copies and its own resets.

    A reset of some environments touches no others. Every array that is returned is new.

    Args:
        env: whose environments are stepped. Its own counts of what has ended are left as they are.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 - gymnasium's interface
    takes_seeds = True

    def __init__(self, env: SyncVectorEnv[Any, Any]) -> None:
        self.vector = env
        self.num_envs = env.num_envs
        self.single_observation_space = env.single_observation_space
        self.observation_space = env.observation_space
        self.single_action_space = env.single_action_space
        self.action_space = env.action_space
        self._discrete = isinstance(env.single_action_space, spaces.Discrete)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all environments, none of which has ended."""
        # A single environment takes a Python integer, as GymWrapper gives it one.
        each = actions.tolist() if self._discrete else iterate(self.action_space, actions)
        stepped = [env.step(action) for env, action in zip(self.vector.envs, each, strict=True)]
        seen, rewards, terminated, truncated, infos = zip(*stepped, strict=True)
        flags = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        return self._joined(seen, None), np.array(rewards, np.float64), *flags, self._merged(infos, range(len(infos)))

    def _merged(self, infos: Sequence[dict[str, Any]], rows: Iterable[int]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        if any(infos):
            for i, info in zip(rows, infos, strict=True):
                merged = self.vector._add_info(merged, info, i)
        return merged

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset what ``options["reset_mask"]`` marks, or all; observations of others mean nothing."""
        rest = {name: value for name, value in (options or {}).items() if name != "reset_mask"} or None
        mask = (options or {}).get("reset_mask")
        rows = list(range(self.num_envs)) if mask is None else np.flatnonzero(mask).tolist()
        seeds = seed if isinstance(seed, list) else [seed] * self.num_envs
        begun = [self.vector.envs[i].reset(seed=seeds[i], options=rest) for i in rows]
        seen, infos = zip(*begun, strict=True)
        return self._joined(seen, None if mask is None else rows), self._merged(infos, rows)

    def _joined(self, seen: Sequence[Any], rows: list[int] | None) -> Any:
        """Observations of the environments ``rows`` (None: all of them) as those of all.

        Raises:
            ValueError: one does not have the shape of its space.
        """
        space = self.single_observation_space
        if not isinstance(space, spaces.Box):
            if rows is not None:
                filled = [seen[0]] * self.num_envs
                for i, value in zip(rows, seen, strict=True):
                    filled[i] = value
                seen = filled
            return concatenate(space, seen, cast(Any, create_empty_array(space, self.num_envs, fn=np.zeros)))
        try:
            joined = np.array(seen).astype(space.dtype, casting="same_kind", copy=False)
        except ValueError:  # of several shapes
            joined = np.empty(0)
        if joined.shape != (len(seen), *space.shape):
            wrong = next(np.shape(value) for value in seen if np.shape(value) != space.shape)
            raise ValueError(f"an observation has the shape {wrong}, and its space says {space.shape}")
        if rows is None:
            return joined
        out = np.zeros((self.num_envs, *space.shape), space.dtype)
        out[rows] = joined
        return out

    def __repr__(self) -> str:
        return repr(self.vector)


if TYPE_CHECKING:
    _Wrapper = VectorWrapper[Any, Any, Any, Any, Any]
else:
    _Wrapper = VectorWrapper  # not generic before gymnasium 1.4

_MADE_UP = "so that this step would be collected as a transition that never was"
_ALL_RESET = "so that environments would be reset in the middle of their episodes"
_EACH = "wrap each environment, gymnasium.make_vec(..., wrappers=[gymnasium.wrappers.{name}])"


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """When ``env`` resets what has ended; with an attribute ``auto_reset``, as ManiSkill has it, within the step.

    Raises:
        ValueError: it does not declare it.
    """
    mode, itself = env.metadata.get("autoreset_mode"), getattr(env, "auto_reset", None)
    if isinstance(itself, bool) and (mode is None or env.metadata is VectorEnv.metadata):  # which other classes write
        mode = AutoresetMode.SAME_STEP if itself else AutoresetMode.DISABLED
    if mode is None:
        raise ValueError(
            f"env: {env} does not say when it resets environments that have ended: expected a "
            "gymnasium.vector.AutoresetMode in metadata['autoreset_mode'], got none. Set it to the mode that it has, "
            "or pass the vector environment that its package makes of it, such as ManiSkillVectorEnv."
        )
    return AutoresetMode(mode)


def is_generic(env: VectorEnv[Any, Any, Any]) -> bool:
    """Whether it holds single environments, each of which gymnasium resets when asked to."""
    return isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))


def check_parts(env: VectorEnv[Any, Any, Any]) -> None:
    """Test that some environments can be reset while the others stay as they are, in the mode of ``env``.

    Raises:
        ValueError: they cannot; the message names what can.
    """
    mode, base = autoreset_mode(env), env.unwrapped
    if mode is AutoresetMode.SAME_STEP:
        return
    for layer in _layers(env):
        if isinstance(layer, NormalizeObservation):
            raise ValueError(
                f"env: {layer} (gymnasium.wrappers.vector) takes no resets of some environments, and has no mode in "
                f"which they are not needed. Instead, {_EACH.format(name='NormalizeObservation')}, or append the "
                "transform VecNorm to this environment without it."
            )
        if isinstance(layer, NormalizeReward):
            raise ValueError(
                f"env: {layer} (gymnasium.wrappers.vector) forgets the returns of all environments when some are "
                "reset. Create the vector environment with autoreset_mode=AutoresetMode.SAME_STEP, or "
                f"{_EACH.format(name='NormalizeReward')}."
            )
    if isinstance(base, (SyncVectorEnv, CartPoleVectorEnv)):
        return
    if isinstance(base, AsyncVectorEnv):
        # Its processes forget that they were reset unless memory is shared (gymnasium 1.4).
        if mode is AutoresetMode.NEXT_STEP and not base.shared_memory:
            raise ValueError(
                f"env: {env} resets what has ended with the next step (AutoresetMode.NEXT_STEP), also if it was reset "
                f"before, {_MADE_UP}. Create it with shared_memory=True, or with autoreset_mode=AutoresetMode.DISABLED."
            )
    elif not _reads_mask(base):
        never = mode is AutoresetMode.DISABLED
        raise ValueError(
            f"env: {env} {'never resets by itself' if never else 'resets what has ended with the next step'} "
            f"(AutoresetMode.{mode.name}), and cannot be asked to reset that alone: its reset() does not read "
            f"options['reset_mask'], {_ALL_RESET if never else _MADE_UP}. {_instead(env)}"
        )


def _instead(env: VectorEnv[Any, Any, Any]) -> str:
    spec = env.spec
    if spec is not None and spec.entry_point is not None:
        return (
            f"Use GymEnv({spec.id!r}, num_envs={env.num_envs}), or gymnasium.make_vec({spec.id!r}, "
            f"num_envs={env.num_envs}, vectorization_mode='sync')."
        )
    return (
        "Let reset() take options={'reset_mask': mask}, which resets the environments that the bool array marks, at "
        "once and not again with the next step; or use single environments, in SerialEnv or ParallelEnv."
    )


def _reads_mask(env: VectorEnv[Any, Any, Any]) -> bool:
    """Whether ``options["reset_mask"]`` means something to ``env``; only its code shows it."""
    for reset in (vars(cls)["reset"] for cls in type(env).__mro__ if "reset" in vars(cls)):
        code = getattr(inspect.unwrap(reset), "__code__", None)
        if code is None or "reset_mask" in code.co_consts:
            return code is not None
        hands_on = any(isinstance(const, tuple) and "options" in const for const in code.co_consts)
        if not hands_on and not code.co_flags & inspect.CO_VARKEYWORDS:  # super().reset() does not get the mask
            return False
    return False


def _layers(env: Any) -> Iterator[Any]:
    """The wrappers around a vector environment, outermost first, and the environment."""
    yield env
    while isinstance(env, VectorWrapper):
        env = env.env
        yield env


def in_parts(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """``env``, to be stepped and reset through what this returns."""
    if type(env) is SyncVectorEnv:
        return InTurn(env)
    if type(env) is CartPoleVectorEnv:
        return CartPoleParts(env)
    *_, last = _layers(env)
    if type(last) is CartPoleVectorEnv:
        wrapper = next(layer for layer in _layers(env) if getattr(layer, "env", None) is last)
        wrapper.env = CartPoleParts(last)
    return env


class CartPoleParts(_Wrapper):
    """gymnasium's vector form of CartPole, of which ``options["reset_mask"]`` resets some environments alone."""

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset what the mask marks, or all; observations of others are those of their last step."""
        rest = {name: value for name, value in (options or {}).items() if name != "reset_mask"} or None
        mask = (options or {}).get("reset_mask")
        env: Any = self.env
        if mask is None or mask.all():
            return self.env.reset(seed=seed, options=rest)  # type: ignore[arg-type]
        others = ~mask
        state, steps, done = env.state, env.steps, env.prev_done
        _, info = self.env.reset(seed=seed, options=rest)  # type: ignore[arg-type]
        env.state[:, others], env.steps[others], env.prev_done[others] = state[:, others], steps[others], done[others]
        return np.ascontiguousarray(env.state.T.astype(np.float32)), info


OUTCOME = ("reward", "done", "terminated", "truncated")


class Readers(NamedTuple):
    """Functions that convert gymnasium's values to arrays of the whole batch, by key.

    Attributes:
        step: from the five values of a step.
        reset: from the two values of a reset.
        final: observations of a single environment, unbatched.
        info: what is read from ``info``.
    """

    step: Callable[[Any], Values]
    reset: Callable[[Any], Values]
    final: Callable[[Any], Values]
    info: Callable[[dict[str, Any]], Values]


class VectorEpisodes:
    """Steps and resets a vector environment so that no transition crosses from an episode to the next.

    - ``DISABLED``: the environment never resets by itself; parts of it are reset by ``reset_mask``.
    - ``NEXT_STEP``: it would spend its next step on the reset. Resetting by ``reset_mask`` before that
      step prevents it, where the environment can (:func:`in_parts`); else the constructor
      raises.
    - ``SAME_STEP``: it resets within the step. The true last observation is in ``info["final_obs"]``;
      the first one of the new episode is kept until it is asked for.

    An environment whose episode has ended and that is stepped on without a reset (while others run on)
    stays as it ended: the same data with a reward of zero.

    Args:
        env: the vector environment.

    Attributes:
        seeds_parts: whether a reset of some environments can seed them.

    Raises:
        ValueError: the environment cannot be made to reset only on request.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        check_parts(env)
        self.env = env = in_parts(env)
        self.mode = autoreset_mode(env)
        self.masked = self.mode is not AutoresetMode.SAME_STEP or is_generic(env)
        self.seeds_parts = is_generic(env) or isinstance(env, InTurn)
        self._takes_seeds = is_generic(env) or getattr(env.unwrapped, "takes_seeds", False)  # one for each environment
        self.ended: Rows = np.zeros(env.num_envs, np.bool_)
        self._holds = False  # whether any has
        self._last: Values | None = None  # data of the last step, while anything has ended
        self._fresh: Values | None = None  # first observations of new episodes (SAME_STEP)
        self._is_fresh: Rows = np.zeros(env.num_envs, np.bool_)

    def step(self, actions: Any, read: Readers) -> Values:
        """Step all environments; returns the content of ``"next"``, true last observations included."""
        held = self.ended if self._holds else None
        resets_itself = self.mode is AutoresetMode.SAME_STEP
        if held is not None and not resets_itself:
            self.env.reset(options={"reset_mask": held.copy()})
        values = self.env.step(actions)
        out = read.step(values)
        now = out["done"].copy() if held is None else out["done"] & ~held
        ended = bool(np.count_nonzero(now))  # far cheaper than any()
        if resets_itself:
            self._is_fresh = now
            if ended:
                self._fresh = {key: value.copy() for key, value in out.items() if key not in OUTCOME}
                self._put_final(out, values[4], now, read)
        if held is not None and self._last is not None:
            _put(out, self._last, held)
            out["reward"][held] = 0.0
        self.ended = now if held is None else held | now
        self._holds = ended or held is not None
        self._last = {key: value.copy() for key, value in out.items()} if self._holds else None
        return out

    def reset(
        self, rows: Rows | None, read: Readers, *, seed: list[int | None] | None, options: dict[str, Any] | None
    ) -> Values:
        """Begin new episodes.

        Args:
            rows: bool ``[num_envs]``, with a True in it; None for all, also those that were reset.
            read: readers of the values.
            seed: for each environment.
            options: for the environments' reset.

        Raises:
            EnvError: the environment cannot reset in parts and has not done so by itself.
        """
        kwargs: dict[str, Any] = {} if seed is None else {"seed": seed if self._takes_seeds else seed[0]}
        if rows is None:
            rows = np.ones_like(self.ended)
            served = np.zeros_like(rows)
        else:
            served = rows & self._is_fresh & (not kwargs and not options)
        rest = rows & ~served
        count = np.count_nonzero(rest)
        if count == len(rest):
            out = read.reset(self.env.reset(options=options, **kwargs))
        elif not count and self._fresh is not None:
            out = dict(self._fresh)
        elif kwargs and not self.seeds_parts:
            raise EnvError(f"{self.env} cannot be seeded in parts. Reset all of its environments with the seed.")
        elif self.masked:
            out = read.reset(self.env.reset(options={**(options or {}), "reset_mask": rest}, **kwargs))
            if self._fresh is not None:
                _put(out, self._fresh, served)
        else:
            raise EnvError(
                f"{self.env} cannot reset its environments {np.flatnonzero(rest).tolist()} alone: only "
                "those whose episode ended with the last step have been reset. Reset all of them, or "
                "create it with autoreset_mode=AutoresetMode.DISABLED."
            )
        self.ended = self.ended & ~rows
        self._holds = bool(np.count_nonzero(self.ended))
        self._is_fresh = self._is_fresh & ~rows
        return out

    def _put_final(self, out: Values, info: dict[str, Any], rows: Rows, read: Readers) -> None:
        """Write true last observations and infos over those of the new episodes."""
        final = info.get("final_obs") if isinstance(info, dict) else None
        if final is None:
            raise EnvError(
                f"{self.env} announces AutoresetMode.SAME_STEP but put no 'final_obs' into info at the end "
                "of an episode, so its last observation is lost. Create it with "
                "autoreset_mode=AutoresetMode.DISABLED."
            )
        if isinstance(info.get("final_info"), dict):
            _put(out, read.info(info["final_info"]), rows)
        for i in np.flatnonzero(rows).tolist():
            for key, value in read.final(_row(final, i)).items():
                out[key][i] = value


def _put(target: Values, source: Values, rows: Rows) -> None:
    """Write marked rows of ``source`` into ``target``, entry by entry of ``target``."""
    for key, value in source.items():
        entry = target.get(key)
        if isinstance(entry, np.ndarray):
            entry[rows] = value[rows]
        elif entry is not None:  # a stack of objects
            for i in np.flatnonzero(rows).tolist():
                entry[i] = value[i]


def _row(values: Any, i: int) -> Any:
    """Row ``i`` of a batch of observations, whether it is an array, an array of objects or a dictionary."""
    return {key: _row(value, i) for key, value in values.items()} if isinstance(values, dict) else values[i]


def is_batched(thing: Any) -> bool:
    """Whether an object steps ``num_envs`` environments, as those of Isaac Lab and mjlab, and is no ``VectorEnv``."""
    if isinstance(thing, (VectorEnv, type)):
        return False
    base = getattr(thing, "unwrapped", None)
    many = isinstance(thing, gymnasium.Env) or getattr(base, "is_vector_env", False) is True
    return many and isinstance(getattr(base, "num_envs", None), int) and hasattr(base, "single_action_space")


class BatchedEnv(VectorEnv[Any, Any, Any]):
    """Such an environment as a vector environment of gymnasium.

    Where it does not say when it resets what has ended (``metadata["autoreset_mode"]``), one with ``is_vector_env``
    does so within the step, unless ``cfg.auto_reset`` is False.

    Args:
        env: the environment.
    """

    def __init__(self, env: Any) -> None:
        self.env, base = env, env.unwrapped
        self.metadata = dict(getattr(env, "metadata", None) or {})
        if "autoreset_mode" not in self.metadata and getattr(base, "is_vector_env", False):
            waits = getattr(getattr(base, "cfg", None), "auto_reset", True) is False
            self.metadata["autoreset_mode"] = AutoresetMode.DISABLED if waits else AutoresetMode.SAME_STEP
        self.num_envs, self.spec = base.num_envs, getattr(env, "spec", None)
        find = getattr(env, "get_wrapper_attr", lambda name: getattr(env, name))
        self.single_observation_space = _space(find("single_observation_space"))
        self.single_action_space = _space(find("single_action_space"))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def unwrapped(self) -> Any:
        """The environment without wrappers."""
        return self.env.unwrapped

    def step(self, actions: Any) -> Any:
        """Step all environments."""
        return self.env.step(actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset all environments, or what ``options["reset_mask"]`` marks."""
        return self.env.reset(seed=seed, options=options)

    def close(self, **kwargs: Any) -> None:
        """Close the environment."""
        self.env.close()

    def __repr__(self) -> str:
        return f"{class_path(self.unwrapped)}(num_envs={self.num_envs})"


def _space(space: Any) -> spaces.Space[Any]:
    """A space of gymnasium; those of mjlab have the same attributes.

    Raises:
        TypeError: it is none, nor like one.
    """
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "spaces"):
        return spaces.Dict({name: _space(one) for name, one in space.spaces.items()})
    if hasattr(space, "low"):
        return spaces.Box(space.low, space.high, space.shape, space.dtype)
    raise TypeError(f"env: expected spaces of gymnasium, or a Box or Dict like its own, got {class_path(space)}.")
