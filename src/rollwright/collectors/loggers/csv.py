"""CSVLogger: numbers as a table in a file, and videos beside it."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwright._video import VideoFiles
from rollwright.collectors.loggers.base import StatsLogger


class CSVLogger(StatsLogger):
    """Writes numbers to ``log_dir/progress.csv``, one row for each call, and videos to ``log_dir/videos``.

    The first columns are ``step`` and ``time`` (seconds since 1970); the others have the names of the numbers. A number
    that comes for the first time adds a column. What the file held before stays: a resumed run goes on in it. Each row
    is on disk when the call returns.

    Args:
        log_dir: folder, made where needed.
        prefix: of the names of columns, where the logger is called as a function.
        every_s: seconds between two calls that write; see :class:`StatsLogger`.
        video_format: ``"mp4"`` or ``"gif"``; None: mp4 where ffmpeg is there (extra ``video``), else gif.

    Raises:
        ValueError: ``every_s`` is negative, or ``video_format`` is unknown.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with CSVLogger(folder.name) as logger:
        ...     logger.log({"loss": 0.5}, step=100)
        ...     logger.log({"loss": 0.25, "accuracy": 0.9}, step=200)
        >>> [row.split(",")[0] for row in (Path(folder.name) / "progress.csv").read_text().split()]
        ['step', '100', '200']
        >>> folder.cleanup()
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        prefix: str = "collector",
        every_s: float = 0.0,
        video_format: str | None = None,
    ) -> None:
        super().__init__(log_dir, prefix=prefix, every_s=every_s)
        if video_format not in (None, "mp4", "gif"):
            raise ValueError(f"video_format: expected 'mp4', 'gif' or None, got {video_format!r}.")
        self.video_format = video_format

    def _open(self, folder: Path) -> Any:
        return _Table(folder / "progress.csv")

    def _write(self, sink: Any, values: dict[str, float], step: int) -> None:
        sink.add({"step": step, "time": round(time.time(), 3), **values})

    def _write_video(self, sink: Any, name: str, frames: NDArray[np.uint8], step: int, fps: float) -> None:
        suffix = None if self.video_format is None else f".{self.video_format}"
        VideoFiles(sink.path.parent / "videos", suffix).log_video(name, frames.transpose(0, 3, 1, 2), step, fps)

    def _close(self, sink: Any) -> None:
        sink.close()


class _Table:
    """A CSV file that grows by rows, and by columns where a row has new ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns = ["step", "time"]
        self._file: Any = None
        if path.is_file() and path.stat().st_size:
            with path.open(newline="") as file:
                self._columns = next(csv.reader(file))

    def add(self, row: dict[str, float]) -> None:
        new = [name for name in row if name not in self._columns]
        if new and self.path.is_file():
            self.close()
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            partial = self.path.with_suffix(".partial")
            with partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(rows)
            partial.replace(self.path)
        self._columns += [name for name in new if name not in self._columns]
        if self._file is None:
            self._file = self.path.open("a", newline="")
            if not self._file.tell():
                csv.DictWriter(self._file, self._columns).writeheader()
        csv.DictWriter(self._file, self._columns).writerow(row)
        self._file.flush()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
