"""Builds the gymnasium environments that ``GymEnv`` names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import AddRenderObservation, OrderEnforcing

from rollwright._foreign import class_path
from rollwright.envs.libs._registered import check_registered, registered
from rollwright.errors import EnvError

GymnasiumEnv = gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]
Wrap = Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]

MODES = ("async", "sync", "vector_entry_point")


class FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any], gymnasium.utils.RecordConstructorArgs):
    """Repeats each action; the reward is the sum, the observation the last, and an episode's end stops it."""

    def __init__(self, env: gymnasium.Env[Any, Any], frame_skip: int) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, frame_skip=frame_skip)
        gymnasium.Wrapper.__init__(self, env)
        self.frame_skip = frame_skip

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step up to ``frame_skip`` times."""
        total: Any = 0.0
        for _ in range(self.frame_skip):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


class _FirstFrame(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Resets the bare environment, below wrappers that count episodes or keep statistics."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        bare: gymnasium.Env[Any, Any] = self.env
        while isinstance(bare, gymnasium.Wrapper) and not isinstance(bare, OrderEnforcing):
            bare = bare.env
        return bare.reset(**kwargs)


def add_pixels(env: gymnasium.Env[Any, Any], pixels_only: bool) -> gymnasium.Env[Any, Any]:
    """``env`` with what it renders among its observations.

    The size of a frame shows only after a reset. It is one of the bare environment, which wrappers do not see.
    """
    pixels = AddRenderObservation(_FirstFrame(env), render_only=pixels_only, obs_key="observation")
    pixels.env = env
    return pixels


def space_of(env: GymnasiumEnv, name: str) -> gymnasium.Space[Any]:
    """A space of one environment.

    Raises:
        EnvError: it has none.
    """
    name = f"single_{name}" if isinstance(env, VectorEnv) else name
    space: gymnasium.Space[Any] | None = getattr(env, name, None)
    if space is None:
        raise EnvError(f"env: {class_path(env)} has no {name}. Set self.{name} in its constructor.")
    return space


def name_of_observation(env: GymnasiumEnv, from_pixels: bool, pixels_only: bool) -> str:
    """The key of observations that have no name of their own: ``"pixels"`` where they are images in colours."""
    space = space_of(env, "observation_space")
    image = isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[-1] == 3
    full_range = isinstance(space, Box) and bool((space.low == 0).all() and (space.high == 255).all())
    return "pixels" if (image and full_range) or (from_pixels and pixels_only) else "observation"


def _check_frame_skip(frame_skip: int | None) -> None:
    if frame_skip is not None and (not isinstance(frame_skip, int) or frame_skip < 1):
        raise ValueError(f"frame_skip: expected a number of at least 1, or None, got {frame_skip!r}.")


def wrappers_for(frame_skip: int | None, from_pixels: bool, pixels_only: bool) -> list[Wrap]:
    """The wrappers that these options ask for, innermost first."""
    wrappers: list[Wrap] = []
    if frame_skip is not None and frame_skip > 1:
        wrappers.append(partial(FrameSkip, frame_skip=frame_skip))
    if from_pixels:
        wrappers.append(partial(add_pixels, pixels_only=pixels_only))
    return wrappers


def decorate(env: GymnasiumEnv, frame_skip: int | None, from_pixels: bool, pixels_only: bool) -> GymnasiumEnv:
    """Wrap an environment that exists.

    Raises:
        ValueError: the options do not fit the environment.
    """
    _check_frame_skip(frame_skip)
    wrappers = wrappers_for(frame_skip, from_pixels, pixels_only)
    own = 1 if env.spec is None else env.spec.kwargs.get("frameskip", 1)
    if frame_skip is not None and frame_skip > 1 and own != 1:
        raise ValueError(
            f"frame_skip={frame_skip}: {env} repeats each action by itself (frameskip={own}), and the two would "
            f"multiply. Make it with frameskip={frame_skip} and leave frame_skip out, or with frameskip=1."
        )
    if wrappers and isinstance(env, VectorEnv):
        raise ValueError(
            "frame_skip and from_pixels: expected a single environment, got a vector environment. Wrap its "
            "environments when you create it, or use GymEnv(name, num_envs=n, ...)."
        )
    if from_pixels and env.render_mode not in ("rgb_array", "rgb_array_list"):
        raise ValueError(
            "from_pixels: expected an environment with render_mode='rgb_array', got "
            f"render_mode={env.render_mode!r}. Create it with gymnasium.make(..., render_mode='rgb_array')."
        )
    for wrapper in wrappers:
        env = wrapper(env)  # type: ignore[arg-type]
    return env


def make(
    env_name: str,
    num_envs: int,
    vectorization_mode: str,
    frame_skip: int | None,
    from_pixels: bool,
    pixels_only: bool,
    kwargs: dict[str, Any],
) -> GymnasiumEnv:
    """Create ``env_name``, alone (``num_envs=0``) or as a vector environment that never resets itself.

    Raises:
        EnvError: gymnasium does not know it, or could not create it; its message is in ours.
        ValueError: an option has no such value.
    """
    if vectorization_mode not in MODES:
        raise ValueError(f"vectorization_mode: expected one of {MODES}, got {vectorization_mode!r}.")
    if from_pixels:
        kwargs.setdefault("render_mode", "rgb_array")
    _check_frame_skip(frame_skip)
    check_registered(env_name)
    spec = registered(env_name)
    if frame_skip is not None and spec is not None and "frameskip" in spec.kwargs:
        if "frameskip" in kwargs:
            raise ValueError(
                f"frame_skip={frame_skip} and frameskip={kwargs['frameskip']} say the same of {env_name}. Pass one of "
                "them."
            )
        kwargs["frameskip"], frame_skip = frame_skip, None  # Atari skips frames by itself
    wrappers = wrappers_for(frame_skip, from_pixels, pixels_only)
    try:
        if not num_envs:
            env: GymnasiumEnv = gymnasium.make(env_name, **kwargs)
            for wrapper in wrappers:
                env = wrapper(env)  # type: ignore[arg-type]
            return env
        # What comes out is copied into tensors at once, so that the environment may reuse its arrays.
        options = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
        if vectorization_mode == "vector_entry_point":
            kwargs.pop("disable_env_checker")
            options = {}
        return gymnasium.make_vec(env_name, num_envs, vectorization_mode, options, wrappers, **kwargs)  # type: ignore[arg-type]
    except Exception as error:
        raise EnvError(f"GymEnv({env_name!r}): gymnasium raised {type(error).__name__}: {error}") from error
