"""Checks as functions of a module, and as tests of a class that users inherit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import isfunction
from types import ModuleType
from typing import Any


def checks_in(module: ModuleType) -> dict[str, Callable[..., None]]:
    """The public functions that a module defines, by name."""
    defined = {name: found for name, found in vars(module).items() if isfunction(found) and name[0] != "_"}
    return {name: check for name, check in defined.items() if check.__module__ == module.__name__}


def add_tests(suite: type, checks: Iterable[str], run: Callable[[Any, str], None]) -> None:
    """Give a class a method ``test_<name>`` for each check, which calls ``run(self, name)``."""

    def test_of(name: str) -> Callable[[Any], None]:
        def test(self: Any) -> None:
            run(self, name)

        test.__doc__ = f"Run the check ``{name}``."
        return test

    for name in checks:
        setattr(suite, f"test_{name}", test_of(name))
