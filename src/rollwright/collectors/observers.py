"""Observers: loggers and a progress bar that follow what a collector delivers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollwright._progress import CollectionProgress, stderr_progress
from rollwright.collectors.loggers import Logger, numbers_in


@dataclass
class _Log:
    """A logger, and when it was last written to."""

    logger: Logger
    every_s: float
    prefix: str
    written_at: float = -float("inf")

    def write(self, stats: dict[str, Any]) -> None:
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
        progress: show a progress bar.
        name: of the collector's class.
        noun: what it counts.

    Attributes:
        follow: whether there are any.
    """

    def __init__(self, stats: Callable[[], dict[str, Any]], *, progress: bool, name: str, noun: str) -> None:
        self._stats, self._name, self._noun = stats, name, noun
        self._logs: list[_Log] = []
        self._shows = self.follow = progress
        self._progress: CollectionProgress | None = None

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
                self.close()
        for log in self._logs:
            log.write(stats)

    def close(self) -> None:
        """The collection has ended: leave what is drawn."""
        if self._progress is not None:
            self._progress.stop()
