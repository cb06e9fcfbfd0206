"""DMControlEnv and DMControlWrapper: environments of dm_control."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rollwright._foreign import class_path, is_dm_env
from rollwright.envs.libs._make import decorate
from rollwright.envs.libs._registered import Available
from rollwright.envs.libs.dm_control.adapter import DMEnvAdapter
from rollwright.envs.libs.gym import GymWrapper
from rollwright.errors import EnvError, require


class DMControlWrapper(GymWrapper):
    """An environment of dm_control, or another ``dm_env.Environment``, that exists already.

    Observations have their names and dtypes (float64 as a rule), and so have actions and rewards; scalars have shape
    ``[1]``. An episode that ends with a discount of 0 is terminated, any other is truncated. Attributes that are
    not found here are looked up in the environment of dm_env (``physics``, ``task``).

    A seed sets the generator of the task, so that the next episodes are those of
    ``suite.load(..., task_kwargs={"random": seed})``. What a few tasks draw while they are made stays as it is.

    Args:
        env: the environment.
        categorical_action_encoding: discrete actions as integers instead of one-hot.
        device: where tensors are put; None leaves them on CPU without naming a device.
        from_pixels: add what a camera sees as ``"pixels"``, uint8 ``[height, width, 3]``.
        pixels_only: with ``from_pixels``: leave out all other observations.
        frame_skip: repeat each action so many times; rewards are summed.
        camera_id: the camera of ``from_pixels``.
        render_kwargs: further arguments of ``physics.render``, such as ``height`` and ``width``.
        seed: same as calling ``set_seed(seed)`` first, but leaves torch's generator alone.
        allow_done_after_reset: see :class:`~rollwright.envs.EnvBase`.
        run_type_checks: see :class:`~rollwright.envs.EnvBase`.
        policy: see :class:`~rollwright.envs.EnvBase`.

    Raises:
        TypeError: ``env`` is no environment of dm_env.
        EnvError: a spec of it has no counterpart here; ``seed`` is given and it has no generator.

    Example:
        >>> from dm_control import suite  # doctest: +SKIP
        >>> env = DMControlWrapper(suite.load("cartpole", "balance"))  # doctest: +SKIP
        >>> env.rollout(3)["position"].dtype  # doctest: +SKIP
        torch.float64
    """

    reward_dtype = np.float64

    def __init__(
        self,
        env: Any,
        categorical_action_encoding: bool = False,
        *,
        device: torch.device | str | int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = False,
        frame_skip: int | None = None,
        camera_id: int | str = 0,
        render_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        allow_done_after_reset: bool = False,
        run_type_checks: bool = False,
        policy: Callable[..., Any] | None = None,
    ) -> None:
        if not is_dm_env(env):
            raise TypeError(
                f"env: expected a dm_env.Environment, got {class_path(env)}. Pass dm_control.suite.load(domain, task), "
                "or call DMControlEnv(domain, task)."
            )
        adapter = DMEnvAdapter(env, {"camera_id": camera_id, **(render_kwargs or {})})
        whole = decorate(adapter, frame_skip, from_pixels, pixels_only)
        root = "pixels" if from_pixels and pixels_only else "observation"
        self._setup(whole, root, categorical_action_encoding, device, allow_done_after_reset, run_type_checks)
        self._seed_envs(seed, False)

    @property
    def dm_env(self) -> Any:
        """The environment of dm_env."""
        return self._env.unwrapped.environment

    @property
    def env_name(self) -> str:
        """The class of the task; of the environment where it has none."""
        return type(getattr(self.dm_env, "task", self.dm_env)).__name__

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        if seed is not None:
            _ = self._env.unwrapped.random  # fails here rather than in the next reset
        return super()._seed_envs(seed, static_seed)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_env" not in self.__dict__ or name.startswith("_") or hasattr(type(self), name):
                raise
            return getattr(self.dm_env, name)


class DMControlEnv(DMControlWrapper):
    """A task of dm_control's suite by its name.

    See :class:`DMControlWrapper` for its entries, and for the options that are not below.

    Args:
        env_name: name of the domain, such as ``"cheetah"``.
        task_name: name of the task, such as ``"run"``.
        task_kwargs: go to the task (``time_limit``).
        environment_kwargs: go to the environment (``control_timestep``, ``flat_observation``).

    Raises:
        MissingExtraError: dm_control is not installed; the message has the command that installs it.
        EnvError: there is no such task, or dm_control cannot make it; its message is repeated.

    Example:
        >>> env = DMControlEnv("cheetah", "run", frame_skip=4)  # doctest: +SKIP
        >>> env.rollout(3)["next", "reward"].dtype  # doctest: +SKIP
        torch.float64
    """

    available_envs = Available(lambda: _tasks(), "Names of the domains, each with those of its tasks.")

    def __init__(
        self,
        env_name: str,
        task_name: str,
        *,
        task_kwargs: Mapping[str, Any] | None = None,
        environment_kwargs: Mapping[str, Any] | None = None,
        categorical_action_encoding: bool = False,
        device: torch.device | str | int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = False,
        frame_skip: int | None = None,
        camera_id: int | str = 0,
        render_kwargs: Mapping[str, Any] | None = None,
        seed: int | None = None,
        allow_done_after_reset: bool = False,
        run_type_checks: bool = False,
        policy: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            _load(env_name, task_name, seed, task_kwargs, environment_kwargs),
            categorical_action_encoding,
            device=device,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
            frame_skip=frame_skip,
            camera_id=camera_id,
            render_kwargs=render_kwargs,
            seed=seed,
            allow_done_after_reset=allow_done_after_reset,
            run_type_checks=run_type_checks,
        )
        self._name, self.task_name = env_name, task_name

    @property
    def env_name(self) -> str:
        """The name of the domain."""
        return str(self.__dict__.get("_name", "?"))

    def __repr__(self) -> str:
        task = self.__dict__.get("task_name", "?")
        return f"DMControlEnv(env={self.env_name}, task={task}, batch_size=[], device={self.device})"


def _tasks() -> list[tuple[str, list[str]]]:
    suite = require("dm_control.suite", extra="dm_control", purpose="DMControlEnv")
    return [(domain, list(tasks)) for domain, tasks in suite.TASKS_BY_DOMAIN.items()]


def _load(env_name: str, task_name: str, seed: int | None, task: Mapping[str, Any] | None, env: Any) -> Any:
    suite = require("dm_control.suite", extra="dm_control", purpose="DMControlEnv")
    tasks: dict[str, Any] = suite.TASKS_BY_DOMAIN
    if env_name not in tasks:
        raise EnvError(f"env_name: dm_control has no domain {env_name!r}. It has {', '.join(sorted(tasks))}.")
    if task_name not in tasks[env_name]:
        raise EnvError(f"task_name: {env_name!r} has no task {task_name!r}. It has {', '.join(tasks[env_name])}.")
    given = dict(task or {})
    if seed is not None:
        given.setdefault("random", seed)
    try:
        return suite.load(env_name, task_name, task_kwargs=given, environment_kwargs=None if env is None else dict(env))
    except Exception as error:
        raise EnvError(
            f"DMControlEnv({env_name!r}, {task_name!r}): dm_control raised {type(error).__name__}: {error}"
        ) from error
