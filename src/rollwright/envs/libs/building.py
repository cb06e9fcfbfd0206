"""Environments by name: the packages that register them, and how ``GymEnv`` builds those of gymnasium."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import AddRenderObservation, OrderEnforcing

from rollwright._foreign import class_path
from rollwright._warnings import warn_user
from rollwright.errors import EnvError, MissingExtraError


class GymKeywords(TypedDict, total=False):
    """What ``gymnasium.make`` and the environments of gymnasium, ALE and gymnasium-robotics take."""

    max_episode_steps: int | None
    order_enforce: bool
    render_mode: str | None
    # Classic control and Box2D
    sutton_barto_reward: bool
    g: float
    goal_velocity: float
    continuous: bool
    gravity: float
    enable_wind: bool
    wind_power: float
    turbulence_power: float
    hardcore: bool
    lap_complete_percent: float
    domain_randomize: bool
    verbose: bool
    # Toy text
    desc: Sequence[str] | None
    map_name: str | None
    is_slippery: bool
    success_rate: float
    reward_schedule: tuple[float, float, float]
    natural: bool
    sab: bool
    is_rainy: bool
    rainy_probability: float
    fickle_passenger: bool
    fickle_probability: float
    # MuJoCo and robotics
    xml_file: str
    default_camera_config: Mapping[str, Any]
    width: int
    height: int
    camera_id: int | None
    camera_name: str | None
    forward_reward_weight: float
    ctrl_cost_weight: float
    contact_cost_weight: float
    contact_cost_range: tuple[float, float]
    contact_force_range: tuple[float, float]
    healthy_reward: float
    healthy_z_range: tuple[float, float]
    healthy_angle_range: tuple[float, float]
    healthy_state_range: tuple[float, float]
    terminate_when_unhealthy: bool
    reset_noise_scale: float
    exclude_current_positions_from_observation: bool
    include_cfrc_ext_in_observation: bool
    reward_type: Literal["sparse", "dense"]
    maze_map: Sequence[Sequence[int | str]]
    continuing_task: bool
    # Atari
    frameskip: int | tuple[int, int]
    repeat_action_probability: float
    full_action_space: bool
    obs_type: Literal["rgb", "grayscale", "ram"]
    mode: int | None
    difficulty: int | None
    max_num_frames_per_episode: int | None
    sound_obs: bool
    continuous_action_threshold: float


class EnvPoolKeywords(TypedDict, total=False):
    """What ``envpool.make`` and its environments take."""

    num_threads: int
    thread_affinity_offset: int
    max_episode_steps: int
    reward_threshold: float
    base_path: str
    img_height: int
    img_width: int
    stack_num: int
    gray_scale: bool
    frame_skip: int
    noop_max: int
    zero_discount_on_life_loss: bool
    episodic_life: bool
    reward_clip: bool
    use_inter_area_resize: bool
    use_fire_reset: bool
    full_action_space: bool
    repeat_action_probability: float
    post_constraint: bool
    ctrl_cost_weight: float
    forward_reward_weight: float
    healthy_reward: float
    terminate_when_unhealthy: bool
    exclude_current_positions_from_observation: bool
    reset_noise_scale: float


Function = TypeVar("Function", bound=Callable[..., Any])


class set_gym_backend:
    """Choose the package that :class:`~rollwright.envs.GymEnv` builds environments with.

    Only gymnasium is supported. The function exists so that programs which name their backend run
    unchanged, and so that those which ask for another get an error. ``"gym"``, which gymnasium has continued, means
    gymnasium, with a warning.

    Args:
        backend: ``"gymnasium"`` or ``"gym"``, or the imported module.

    Raises:
        ValueError: any other backend.

    Example:
        >>> set_gym_backend("gymnasium").set()
        >>> with set_gym_backend("gymnasium"):
        ...     gym_backend().__name__
        'gymnasium'
        >>> @set_gym_backend("gymnasium")
        ... def make():
        ...     return gym_backend().make("CartPole-v1")
    """

    def __init__(self, backend: str | ModuleType) -> None:
        name = backend.__name__ if isinstance(backend, ModuleType) else backend
        if name == "gym":
            warn_user(
                "backend: 'gym' is no longer maintained; environments are made by gymnasium, which has continued it. "
                "Write set_gym_backend('gymnasium').",
            )
        elif name != "gymnasium":
            raise ValueError(
                f"backend: expected 'gymnasium' or the gymnasium module, got {backend!r}. Port the "
                "environment to gymnasium, or wrap an old gym environment with shimmy's "
                "GymV26CompatibilityV0."
            )

    def set(self) -> None:
        """Use the backend from now on."""

    def __enter__(self) -> set_gym_backend:
        self.set()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, function: Function) -> Function:
        """Decorate a function that is to run with the backend."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]


def gym_backend(submodule: str | None = None) -> ModuleType:
    """The module that environments are built with, or a module inside of it.

    >>> gym_backend().__name__, gym_backend("spaces").__name__
    ('gymnasium', 'gymnasium.spaces')
    """
    return gymnasium if submodule is None else import_module(f"gymnasium.{submodule}")


T = TypeVar("T")


class Package(NamedTuple):
    """A package that registers environments when it is imported.

    Attributes:
        module: to import.
        install: what ``pip install`` takes.
    """

    module: str
    install: str


_ALE = Package("ale_py", "'rollwright[atari]'")
_ROBOTICS = Package("gymnasium_robotics", "gymnasium-robotics")
_PACKAGES = {  # by how names begin
    "ALE/": _ALE,
    "AdroitHand": _ROBOTICS,
    "AntMaze": _ROBOTICS,
    "BabyAI-": Package("minigrid", "minigrid"),
    "Fetch": _ROBOTICS,
    "FrankaKitchen": _ROBOTICS,
    "HandManipulate": _ROBOTICS,
    "HandReach": _ROBOTICS,
    "MiniGrid-": Package("minigrid", "minigrid"),
    "MiniWorld-": Package("miniworld", "miniworld"),
    "PointMaze": _ROBOTICS,
    "highway-": Package("highway_env", "highway-env"),
    "miniwob/": Package("miniwob", "miniwob"),
    "mo-": Package("mo_gymnasium", "mo-gymnasium"),
}
_ATARI = ("NoFrameskip-v0", "NoFrameskip-v4")  # how old names of Atari end


class Available(Generic[T]):
    """Descriptor of ``available_envs``, which is read from the class and is looked up each time.

    Args:
        find: gives what there is.
        doc: of the attribute.
    """

    def __init__(self, find: Callable[[], list[T]], doc: str) -> None:
        self._find, self.__doc__ = find, doc

    def __get__(self, env: object, kind: Any = None) -> list[T]:
        try:
            return self._find()
        except MissingExtraError as error:  # so that hasattr() says no
            raise AttributeError(str(error)) from error


def registered(env_name: str) -> EnvSpec | None:
    """The spec of a name, such as ``"CartPole-v1"`` or ``"module:Name-v0"``; None where gymnasium reports an error.

    Raises:
        MissingExtraError: the name is one of a known package that is not installed.
    """
    module, _, name = env_name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except Exception:  # gymnasium.make() meets it once more, and reports it
            return None
    elif name not in gymnasium.registry and (package := _package(name)) is not None:
        _import(package, name)
    try:
        return gymnasium.spec(name)  # one without a version, which make() completes, is none
    except gymnasium.error.Error:
        return _newest(name)


def check_registered(env_name: str) -> None:
    """Test that ``gymnasium.make`` knows a name.

    Raises:
        EnvError: it does not; gymnasium's message is in ours, with names like it.
        MissingExtraError: the name is one of a known package that is not installed.
    """
    if registered(env_name) is not None:
        return
    module, _, name = env_name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gymnasium.spec(name)
    except Exception as error:
        raise EnvError(
            f"GymEnv({env_name!r}): gymnasium raised {type(error).__name__}: {_sentence(str(error))} {_remedy(name)}"
        ) from error


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


_NUM_NAMES = 3  # that a message lists


def _remedy(name: str) -> str:
    """What to do about a name that is not registered."""
    base = name.rpartition("-v")[0]
    versions = [id for id in gymnasium.registry if id.rpartition("-v")[0] == base]
    near = versions[::-1] or get_close_matches(name, list(gymnasium.registry), _NUM_NAMES)
    names = "".join(f"{id!r}, " for id in near[:_NUM_NAMES])
    return (
        f"Pass {names}'package:{name}' (imports the package that registers it), or a function that makes the "
        "environment; gymnasium.pprint_registry() prints the names."
    )


def _newest(name: str) -> EnvSpec | None:
    """The spec that ``gymnasium.make`` takes for a name without a version."""
    try:
        namespace, base, version = gymnasium.envs.registration.parse_env_id(name)
    except gymnasium.error.Error:
        return None
    found = [spec for spec in gymnasium.registry.values() if (spec.namespace, spec.name) == (namespace, base)]
    if version is not None or not found:
        return None
    return max(found, key=lambda spec: -1 if spec.version is None else spec.version)


def _package(name: str) -> Package | None:
    if name.endswith(_ATARI):
        return _ALE
    return next((package for start, package in _PACKAGES.items() if name.startswith(start)), None)


def _import(package: Package, name: str) -> None:
    try:
        importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != package.module:
            raise
        raise MissingExtraError(
            f"GymEnv({name!r}) needs the package {package.module!r}, which registers it and is not installed. Install "
            f"it with: pip install {package.install}"
        ) from error


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
