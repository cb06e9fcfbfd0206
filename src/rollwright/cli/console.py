"""Console: the output of a command, with live progress on a terminal."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.console import RenderableType

from rollwright._progress import CollectionProgress, States
from rollwright.cli.errors import plain


def drop_stdout() -> None:
    """Send what is still to be printed nowhere: the reader of the pipe has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Console:
    """Lines for people on stdout, and the state of a collection.

    Args:
        quiet: print nothing but :meth:`alert`.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._rich = RichConsole(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress: CollectionProgress | None = None

    def line(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self.quiet:
            return
        if self._progress is not None and self._progress.has_bar:
            self._rich.print(text)
            return
        try:
            print(text, flush=True)  # a pipe's reader sees progress as it happens
        except BrokenPipeError:  # the reader has left, and what is collected is not for it alone
            self.quiet = True
            drop_stdout()

    def alert(self, text: str) -> None:
        """Print a line on stderr, also when quiet."""
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def progress(
        self, total: int, below: Callable[[], RenderableType] | None = None, state: States | None = None
    ) -> Iterator[None]:
        """Show progress towards ``total`` frames in the ``with`` block, fed by :meth:`update`.

        Args:
            total: number of frames.
            below: what to show below the bar on a terminal; called some times a second, in another thread.
            state: says how a collection stands, of stats, total, and whether it is to be short; None: in frames.
        """
        shows_bar = self._rich.is_terminal and not self.quiet
        progress = self._progress = CollectionProgress(
            total, self._rich if shows_bar else None, self.line, below, state
        )
        progress.start()
        try:
            yield
        finally:
            progress.stop()
            self._progress = None

    def update(self, stats: Mapping[str, Any]) -> None:
        """Show what ``collector.stats()`` reports: on a terminal at once, else in a line every few seconds."""
        if self._progress is not None:
            self._progress.update(stats)

    @contextmanager
    def warnings_as_lines(self) -> Iterator[None]:
        """Print Python's warnings as lines, each text once."""
        seen: set[str] = set()

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            text = plain(message)
            if text not in seen:
                seen.add(text)
                self.line(f"note: {text}")

        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.simplefilter("ignore", DeprecationWarning)  # for developers of packages, not for users
            warnings.simplefilter("ignore", PendingDeprecationWarning)
            warnings.showwarning = show
            yield
