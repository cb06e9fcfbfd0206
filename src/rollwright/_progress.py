"""How a collection stands: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.text import Text

__all__ = ["CollectionProgress", "States", "count", "state_of", "stderr_progress"]

_SECONDS_BETWEEN_LINES = 2.0
_SECONDS_BETWEEN_DRAWINGS = 0.1
States = Callable[[Mapping[str, Any], Any, bool], str]


def count(number: int, noun: str) -> str:
    """A number and its noun.

    >>> count(1, "frame"), count(2500, "frame")
    ('1 frame', '2,500 frames')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class CollectionProgress:
    """Shows what ``collector.stats()`` reports, between :meth:`start` and :meth:`stop`.

    Args:
        total: number of frames; None: there is no end.
        console: where to draw the bar; None: there is none.
        print_line: prints a line where there is no bar.
        below: what to show below the bar; called some times a second, in another thread.
        state: says how a collection stands, of stats, total, and whether it is to be short; None: in frames.
    """

    def __init__(
        self,
        total: int | None,
        console: RichConsole | None,
        print_line: Callable[[str], None],
        below: Callable[[], RenderableType] | None = None,
        state: States | None = None,
    ) -> None:
        self._total, self._state_of, self._print_line = total, state or state_of, print_line
        self._last = -float("inf")
        self._bar: Progress | None = None
        self._live: Any = None
        if console is not None:
            columns = (BarColumn(bar_width=12), _State(), TimeRemainingColumn())
            bar = self._bar = Progress(*columns, console=console, auto_refresh=below is not None)
            bar.add_task("", total=total, state="starting")
            self._live = bar if below is None else Live(console=console, get_renderable=lambda: Group(bar, below()))

    @property
    def has_bar(self) -> bool:
        """Whether a bar is drawn."""
        return self._bar is not None

    def start(self) -> None:
        """Begin to draw."""
        if self._live is not None:
            self._live.start()
            self._stop = weakref.finalize(self, self._live.stop)  # a terminal has its cursor back in any case

    def update(self, stats: Mapping[str, Any]) -> None:
        """Show numbers: on a terminal at once, else in a line every few seconds; the last ones always."""
        now, ended = time.monotonic(), self._total is not None and stats["frames"] >= self._total
        pause = _SECONDS_BETWEEN_LINES if self._bar is None else _SECONDS_BETWEEN_DRAWINGS
        if now - self._last < pause and not ended:
            return
        self._last = now
        state = self._state_of(stats, self._total, self._bar is not None)
        if self._bar is None:
            self._print_line(state)
        else:
            self._bar.update(self._bar.task_ids[0], completed=stats["frames"], state=state, refresh=True)

    def stop(self) -> None:
        """Leave what is drawn. May be called again."""
        if self._live is not None:
            self._stop()


def stderr_progress(total: int | None, name: str, noun: str) -> CollectionProgress:
    """Progress on stderr, started: of a collector in a program."""
    console = RichConsole(file=sys.stderr, highlight=False, markup=False, emoji=False)

    def line(text: str) -> None:
        print(f"{name}: {text}", file=sys.stderr, flush=True)

    shows_bar = console.is_terminal or console.is_jupyter
    progress = CollectionProgress(total, console if shows_bar else None, line, state=partial(state_of, noun=noun))
    progress.start()
    return progress


class _State(ProgressColumn):
    """Frames, rate, episodes and returns beside the bar."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["state"])


def state_of(stats: Mapping[str, Any], total: int | None, short: bool, noun: str = "frames") -> str:
    """How a collection stands; ``short`` leaves room for a bar in 80 columns."""
    rate, mean = stats["frames_per_second"] or 0, stats["mean_return"]
    per_second, name = ("/s", "return") if short else (f" {noun}/s", "mean return")
    of_all = "" if total is None else f" / {total:,}"
    return (
        f"{stats['frames']:,}{of_all} {noun}, {rate:,.0f}{per_second}, {count(stats['episodes'], 'episode')}, "
        f"{name} {'-' if mean is None else f'{mean:,.1f}'}"
    )
