"""Partial resets of vector environments: which are possible, and what to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from rollwright.envs.libs.vector.in_turn import InTurn

__all__ = ["autoreset_mode", "check_parts", "in_parts", "is_generic"]

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
