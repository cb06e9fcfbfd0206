"""``rollwright top``: what the collectors that run on this machine do, live."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from threading import Event

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rollwright.cli.errors import Failure, plain
from rollwright.cli.workers import table
from rollwright.collectors.reports.live import SWITCH, Reported, running
from rollwright.collectors.reports.report import report_of

_EVERY_S = 1.0
_WIDTH = 120  # where there is no terminal
_SILENT_S = 5.0  # a report is written each second


def run(arguments: argparse.Namespace) -> int:
    """Show the collectors until they have ended, or once where there is no terminal; returns the exit status."""

    def read() -> list[Reported]:
        return [each for each in running() if arguments.pid in (None, each.pid)]

    try:
        found = read()
    except OSError as error:
        raise Failure(plain(error), status=1) from error
    if arguments.json:
        print(json.dumps([each._asdict() for each in found], indent=2))
        return 0
    if not found:
        which = "no collector" if arguments.pid is None else f"no collector of process {arguments.pid}"
        raise Failure(
            f"{which} reports itself. Start your program with {SWITCH}=1 in its environment, or pass progress=True to "
            "the collector.",
            status=1,
        )
    console = RichConsole(file=sys.stdout, highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        watch(console, found, read, Event().wait)
    else:
        console.width = _WIDTH
        console.print(view(found))
    return 0


def watch(
    console: RichConsole, found: list[Reported], read: Callable[[], list[Reported]], wait: Callable[[float], object]
) -> None:
    """Draw the collectors again and again, until none is left or Ctrl-C.

    Args:
        console: where to draw.
        found: what to draw first.
        read: gives what to draw next.
        wait: takes the seconds between two drawings.
    """
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        try:
            while found:
                live.update(view(found), refresh=True)
                wait(_EVERY_S)
                found = read()
        except KeyboardInterrupt:
            return
    console.print("no collector is left")


def view(found: list[Reported]) -> RenderableType:
    """All collectors, one below the other."""
    shown: list[RenderableType] = []
    for each in found:
        silent = f", which has not reported for {each.age_s:,.0f} s" if each.age_s > _SILENT_S else ""
        title = f"{each.program}, process {each.pid}{silent}"
        shown += [Text(title, style="bold"), Text(report_of(each.name, each.stats))]
        if isinstance(each.stats.get("workers"), list):
            shown += [Text(), table(each.stats)]
        shown.append(Text())
    return Group(*shown[:-1])
