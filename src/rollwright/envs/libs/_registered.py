"""Environments by name; packages of known ones are imported, which registers them with gymnasium."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple, TypeVar

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rollwright.errors import EnvError, MissingExtraError

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
