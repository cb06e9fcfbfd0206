"""DMControlEnv and DMControlWrapper: environments of dm_control, and others with the interface of dm_env."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray

from rollwright._foreign import class_path, is_dm_env
from rollwright.envs.libs.building import Available, decorate
from rollwright.envs.libs.gym import GymWrapper
from rollwright.errors import EnvError, require

__all__ = ["DMControlEnv", "DMControlWrapper"]


class DMEnvAdapter(gymnasium.Env[Any, Any]):
    """An environment of dm_env as one of gymnasium; arrays keep their dtypes, and scalars have shape ``[1]``.

    Args:
        environment: a ``dm_env.Environment``.
        render_kwargs: go to ``physics.render`` (``height``, ``width``, ``camera_id``).

    Raises:
        EnvError: a spec of it has no counterpart among gymnasium's spaces.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium's interface
    render_mode = "rgb_array"

    def __init__(self, environment: Any, render_kwargs: Mapping[str, Any]) -> None:
        self.environment = environment
        self.render_kwargs = dict(render_kwargs)
        self.observation_space = _space_of(environment.observation_spec(), "observation_spec")
        self._acts = environment.action_spec()
        self.action_space = _space_of(self._acts, "action_spec")

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the last step of an episode is terminated where its discount is 0, and truncated elsewhere."""
        found = self.environment.step(_shaped_as(self._acts, action))
        last = found.last()
        terminated = bool(last and found.discount == 0)
        reward = np.float64(0.0) if found.reward is None else found.reward
        return _at_least_1d(found.observation), reward, terminated, last and not terminated, {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; ``seed`` first seeds the generator of the task."""
        if seed is not None:
            self.random.set_state(np.random.RandomState(seed).get_state())
        return _at_least_1d(self.environment.reset().observation), {}

    @property
    def random(self) -> np.random.RandomState:
        """The generator that episodes are drawn from: the task's, or the environment's.

        Raises:
            EnvError: there is none.
        """
        task = getattr(self.environment, "task", None)
        for owner, name in ((task, "random"), (self.environment, "random_state")):
            found = getattr(owner, name, None)
            if isinstance(found, np.random.RandomState):
                return found
        raise EnvError(
            f"{self.environment!r} has no generator to seed: neither task.random nor random_state is a "
            "numpy.random.RandomState. Give it its seed when you make it, and leave set_seed out."
        )

    def render(self) -> Any:
        """What a camera sees: uint8 ``[height, width, 3]``."""
        return self.environment.physics.render(**self.render_kwargs)

    def close(self) -> None:
        """Close the environment of dm_env."""
        self.environment.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "environment":
            raise AttributeError(name)
        return getattr(self.environment, name)

    def __repr__(self) -> str:
        return f"DMEnvAdapter({self.environment!r})"


def _space_of(spec: Any, path: str) -> Space[Any]:
    """The space of a spec of dm_env, or of specs in dictionaries and sequences."""
    specs = require("dm_env.specs", extra="dm_control", purpose="DMControlWrapper")
    if isinstance(spec, Mapping):
        return spaces.Dict(OrderedDict((name, _space_of(one, f"{path}[{name!r}]")) for name, one in spec.items()))
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple([_space_of(one, f"{path}[{i}]") for i, one in enumerate(spec)])
    if isinstance(spec, specs.DiscreteArray):
        return spaces.Discrete(spec.num_values, dtype=spec.dtype.type)
    dtype = getattr(spec, "dtype", None)
    if not isinstance(spec, specs.Array) or dtype is None or dtype.kind not in "biuf":
        raise EnvError(f"{path}: expected numbers, got {spec!r}. Leave it out with a wrapper of dm_env.")
    shape = spec.shape or (1,)
    if dtype.kind == "b":
        return spaces.MultiBinary(shape)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if isinstance(spec, specs.BoundedArray):
        low, high = spec.minimum, spec.maximum
    return spaces.Box(_filled(low, shape, dtype), _filled(high, shape, dtype), shape, dtype.type)


def _filled(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.array(np.broadcast_to(np.asarray(bound, dtype), shape))


def _at_least_1d(value: Any) -> Any:
    """Observations with scalars as arrays of one element; integers stay what they are."""
    if isinstance(value, Mapping):
        return {name: _at_least_1d(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_at_least_1d(one) for one in value)
    if isinstance(value, (int, np.integer)) or (isinstance(value, np.ndarray) and value.shape):
        return value
    return np.atleast_1d(value)


def _shaped_as(spec: Any, value: Any) -> Any:
    """Actions in the shapes of their specs."""
    if isinstance(spec, Mapping):
        return {name: _shaped_as(one, value[name]) for name, one in spec.items()}
    if isinstance(spec, (list, tuple)):
        return type(spec)(_shaped_as(one, part) for one, part in zip(spec, value, strict=True))
    return value if getattr(value, "shape", ()) == spec.shape else np.asarray(value).reshape(spec.shape)


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
