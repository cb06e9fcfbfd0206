"""From what the user passes as an environment to one that can be stepped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollwright._keys import as_tuple
from rollwright.collectors.options import CollectorOptions
from rollwright.envs.base import EnvBase
from rollwright.envs.transforms import StepCounter, TransformedEnv

__all__ = ["EnvMaker", "make_env"]

EnvMaker = EnvBase | Callable[..., EnvBase] | Sequence[Callable[..., EnvBase]]


def make_env(create_env_fn: EnvMaker, options: CollectorOptions) -> EnvBase:
    """The environment, on its device, with the transforms that options ask for.

    Raises:
        TypeError: ``create_env_fn`` is not, or does not make, an environment.
        ValueError: options do not fit it.
    """
    made: Any = create_env_fn
    if isinstance(made, Sequence) and not isinstance(made, str):
        if len(made) != 1:
            raise ValueError(
                f"create_env_fn: a collector of one process takes one environment, got {len(made)} factories. "
                "Wrap them in SerialEnv."
            )
        made = made[0]
    if isinstance(made, EnvBase):
        if options.create_env_kwargs:
            raise ValueError("create_env_kwargs: got arguments for an environment that is made. Pass a callable.")
    elif callable(made):
        made = made(**(options.create_env_kwargs or {}))
    if not isinstance(made, EnvBase):
        raise TypeError(
            f"create_env_fn: expected an EnvBase or a callable that returns one, got {type(made).__name__}: "
            f"{made!r}. Wrap a gymnasium environment in GymWrapper."
        )
    device = options.env_device or options.device
    env = made if device is None else made.to(device)
    if options.max_frames_per_traj is not None and options.max_frames_per_traj > 0:
        env = _limit_trajectories(env, options.max_frames_per_traj)
    if options.set_truncated and any(group.truncated is None for group in env._done_groups):
        env = env.add_truncated_keys()
    return env


def _limit_trajectories(env: EnvBase, max_frames: int) -> EnvBase:
    if any("step_count" in as_tuple(key) for key in (*env.observation_keys, *env.state_keys)):
        raise ValueError(
            f"max_frames_per_traj={max_frames}: {env} counts its steps already ('step_count' is among its entries). "
            "Leave max_frames_per_traj out, or take the StepCounter out of the environment."
        )
    return TransformedEnv(env, StepCounter(max_steps=max_frames))
