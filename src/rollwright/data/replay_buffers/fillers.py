"""Fillers: who fills a buffer in the background, so that whoever only watches it learns of their errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["Fillers"]


class Fillers:
    """Those who fill a buffer in threads or processes that this process has started; they are held weakly.

    Example:
        >>> class Filler:
        ...     def raise_error(self):
        ...         raise OSError("the disk is full")
        >>> filler, fillers = Filler(), Fillers()
        >>> fillers.add(filler.raise_error)
        >>> fillers.raise_error()
        Traceback (most recent call last):
        ...
        OSError: the disk is full
    """

    def __init__(self) -> None:
        self._methods: tuple[weakref.WeakMethod[Callable[[], None]], ...] = ()

    def add(self, raise_error: Callable[[], None]) -> None:
        """Ask somebody from now on.

        Args:
            raise_error: a method: raises, once, what ended their work.
        """
        added = weakref.WeakMethod(raise_error)
        self._methods = (*(method for method in self._methods if method() is not None and method != added), added)

    def raise_error(self) -> None:
        """Raise what has ended anybody's work."""
        for method in self._methods:
            raise_error = method()
            if raise_error is not None:
                raise_error()
