"""The package that ``GymEnv`` builds its environments with."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import gymnasium

from rollwright._warnings import warn_user

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
