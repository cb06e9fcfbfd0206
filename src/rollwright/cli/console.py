"""Console: the output of a command, with live progress on a terminal."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

from rollwright.cli.errors import plain

_SECONDS_BETWEEN_LINES = 2.0
_States = Callable[[Mapping[str, Any], int, bool], str]


def count(number: int, noun: str) -> str:
    """A number and its noun.

    >>> count(1, "frame"), count(2500, "frame")
    ('1 frame', '2,500 frames')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
        self._progress: Progress | None = None
        self._total = 0
        self._state: _States = _state
        self._last_line = -float("inf")

    def line(self, text: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self.quiet:
            return
        if self._progress is not None:
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
        self, total: int, below: Callable[[], RenderableType] | None = None, state: _States | None = None
    ) -> Iterator[None]:
        """Show progress towards ``total`` frames in the ``with`` block, fed by :meth:`update`.

        Args:
            total: number of frames.
            below: what to show below the bar on a terminal; called some times a second, in another thread.
            state: says how a collection stands, of stats, total, and whether it is to be short; None: in frames.
        """
        self._total, self._state = total, state or _state
        bar: AbstractContextManager[Any] = nullcontext()
        if self._rich.is_terminal and not self.quiet:
            columns = (BarColumn(bar_width=12), _State(), TimeRemainingColumn())
            progress = self._progress = Progress(*columns, console=self._rich)
            progress.add_task("", total=total, state="starting")
            bar = (
                progress if below is None else Live(console=self._rich, get_renderable=lambda: Group(progress, below()))
            )
        try:
            with bar:
                yield
        finally:
            self._progress = None

    def update(self, stats: Mapping[str, Any]) -> None:
        """Show what ``collector.stats()`` reports: on a terminal at once, else in a line every few seconds."""
        if self._progress is not None:
            state = self._state(stats, self._total, True)
            self._progress.update(self._progress.task_ids[0], completed=stats["frames"], state=state)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or stats["frames"] >= self._total:
            self._last_line = now
            self.line(self._state(stats, self._total, False))

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


class _State(ProgressColumn):
    """Frames, rate, episodes and returns beside the bar."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["state"])


def _state(stats: Mapping[str, Any], total: int, short: bool) -> str:
    """How a collection stands; ``short`` leaves room for a bar in 80 columns."""
    rate, mean = stats["frames_per_second"] or 0, stats["mean_return"]
    per_second, name = ("/s", "return") if short else (" frames/s", "mean return")
    return (
        f"{stats['frames']:,} / {total:,} frames, {rate:,.0f}{per_second}, {count(stats['episodes'], 'episode')}, "
        f"{name} {'-' if mean is None else f'{mean:,.1f}'}"
    )
