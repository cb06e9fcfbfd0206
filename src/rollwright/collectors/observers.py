"""Observers: loggers and a progress bar that follow what a collector delivers, and its report for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rollwright._progress import CollectionProgress, stderr_progress
from rollwright.collectors.loggers import Logger, numbers_in
from rollwright.collectors.reports.live import LiveReport, wants_reports
from rollwright.collectors.reports.statistics import CollectorStats

_LAST_REPORT_S = 1.0  # for one that is being written


@dataclass
class _Log:
    """A logger, and when it was last written to."""

    logger: Logger
    every_s: float
    prefix: str
    written_at: float = -float("inf")

    def write(self, stats: CollectorStats) -> None:
        now = time.monotonic()
        if now - self.written_at < self.every_s and not stats["completed"]:
            return
        self.written_at = now
        path = f"{self.prefix}/" if self.prefix else ""
        self.logger.log({f"{path}{name}": value for name, value in numbers_in(stats)}, stats["frames"])


class Observers:
    """Those who follow the batches that a collector delivers.

    Args:
        stats: of the collector.
        progress: show a progress bar, and let ``rollwright top`` show the collector.
        name: of the collector's class.
        noun: what it counts.

    Attributes:
        follow: whether there are any.
    """

    def __init__(self, stats: Callable[[], CollectorStats], *, progress: bool, name: str, noun: str) -> None:
        self._stats, self._name, self._noun = stats, name, noun
        self._logs: list[_Log] = []
        self._shows = self.follow = progress
        self._progress: CollectionProgress | None = None
        self._live = LiveReport(stats, name) if progress or wants_reports() else None
        if self._live is not None:
            self._live.start()

    def add(self, logger: Logger, every_s: float, prefix: str) -> None:
        """Let a logger follow.

        Raises:
            TypeError, ValueError: it is no logger, or the seconds are negative.
        """
        if not isinstance(logger, Logger):
            raise TypeError(
                f"logger: expected an object with log(values, step), log_video() and close(), got "
                f"{type(logger).__name__}. Pass for example rollwright.collectors.loggers.CSVLogger('runs/first')."
            )
        if not every_s >= 0:
            raise ValueError(f"every_s: expected 0 or more seconds, got {every_s!r}.")
        self._logs.append(_Log(logger, every_s, prefix))
        self.follow = True

    def delivered(self) -> None:
        """A batch is about to be handed out, or was written to the replay buffer."""
        if not self.follow:
            return
        stats = self._stats()
        if self._shows and self._progress is None:
            self._progress = stderr_progress(stats["total_frames"], self._name, self._noun)
        if self._progress is not None:
            self._progress.update(stats)
            if stats["completed"]:
                self._progress.stop()
        for log in self._logs:
            log.write(stats)

    def close(self) -> None:
        """The collector ends: leave what is drawn, and report it no more."""
        if self._live is not None:
            self._live.stop(_LAST_REPORT_S)
        if self._progress is not None:
            self._progress.stop()
