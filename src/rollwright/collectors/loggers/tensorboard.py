"""TensorBoardLogger: statistics of a collector as curves. The only module that imports tensorboard."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwright._video import gif_of
from rollwright.collectors.loggers.base import StatsLogger
from rollwright.errors import require

_EXTRA, _PURPOSE = "tensorboard", "TensorBoardLogger"


class TensorBoardLogger(StatsLogger):
    """Writes the numbers in ``collector.stats()``, or means over batches, into a file that TensorBoard shows.

    A file is made with the first point. Each call writes its points to disk; no thread is started. Videos are shown
    under "Images".

    Args:
        log_dir: folder, made where needed.
        prefix: of the names of curves, where the logger is called as a function.
        every_s: seconds between two calls that write; see :class:`StatsLogger`.

    Raises:
        MissingExtraError: tensorboard is not installed.
        ValueError: ``every_s`` is negative.

    Example:
        >>> import tempfile
        >>> from rollwright.collectors import Collector
        >>> from rollwright.envs import GymEnv
        >>> folder = tempfile.TemporaryDirectory()
        >>> with TensorBoardLogger(folder.name) as log, Collector(GymEnv("CartPole-v1"), total_frames=400) as collector:
        ...     collector.log_to(log)
        ...     for batch in collector:
        ...         pass
        >>> [path.name.split(".")[:3] for path in Path(folder.name).iterdir()]
        [['events', 'out', 'tfevents']]
        >>> folder.cleanup()
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, prefix: str = "collector", every_s: float = 0.0) -> None:
        super().__init__(log_dir, prefix=prefix, every_s=every_s)
        require("tensorboard.summary.writer.record_writer", extra=_EXTRA, purpose=_PURPOSE)

    def _open(self, folder: Path) -> Any:
        writers = require("tensorboard.summary.writer.record_writer", extra=_EXTRA, purpose=_PURPOSE)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        writer = writers.RecordWriter(open(folder / name, "xb"))  # noqa: SIM115 - kept open
        _add_event(writer, file_version="brain.Event:2")
        return writer

    def _write(self, sink: Any, values: dict[str, float], step: int) -> None:
        summary = _summaries().Summary
        points = [summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        _add_event(sink, step=step, summary=summary(value=points))

    def _write_video(self, sink: Any, name: str, frames: NDArray[np.uint8], step: int, fps: float) -> None:
        summary = _summaries().Summary
        image = summary.Image(
            height=frames.shape[1], width=frames.shape[2], colorspace=3, encoded_image_string=gif_of(frames, fps)
        )
        _add_event(sink, step=step, summary=summary(value=[summary.Value(tag=name, image=image)]))

    def _close(self, sink: Any) -> None:
        sink.close()


def _summaries() -> Any:
    return require("tensorboard.compat.proto.summary_pb2", extra=_EXTRA, purpose=_PURPOSE)


def _add_event(writer: Any, **content: Any) -> None:
    events = require("tensorboard.compat.proto.event_pb2", extra=_EXTRA, purpose=_PURPOSE)
    writer.write(events.Event(wall_time=time.time(), **content).SerializeToString())
    writer.flush()
