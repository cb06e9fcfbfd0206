"""Loggers: the numbers of a collector as curves, and videos, in CSV, TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import csv
import math
import os
import re
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._video import VideoFiles, as_frames, gif_of, save_video
from rollwright.data.layout import MASK, TRAJ_IDS
from rollwright.errors import require

__all__ = [
    "CSVLogger",
    "Logger",
    "MLflowLogger",
    "StatsLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "numbers_in",
]

_OF_THE_PROCESS = ("_sink", "_pid", "_lock", "_written_at", "_begun_at", "_frames", "_frames_before", "_episodes")


@runtime_checkable
class Logger(Protocol):
    """Writes numbers and videos. Objects of your own with these methods will do, too."""

    def log(self, values: Mapping[str, Any], step: int | None = None) -> Any:
        """Write numbers by name, at a place on the axis (frames collected, for instance)."""

    def log_video(self, name: str, frames: Any, step: int | None = None, fps: float = 30.0) -> Any:
        """Write a video ``[T, C, H, W]``."""

    def close(self) -> Any:
        """Write what is left, and close files."""


class StatsLogger(ABC):
    """What the loggers of this package have in common.

    :meth:`log` writes numbers that you pass, and :meth:`log_video` videos. Called as a function, a logger writes what
    it is given:

    - ``collector.stats()``: every number in it, at its ``frames``, named after its place: ``collector/episodes``,
      ``collector/seconds/policy``, ``collector/workers/1/frames``;
    - a result of an :class:`~rollwright.collectors.Evaluator`, at its step: pass the logger as ``on_result``;
    - a batch: pass the logger as ``post_collect_hook``. Then it writes ``reward`` (mean), ``episodes_ended`` (number),
      ``policy_version`` (the newest, where it is tracked) and ``frames_per_second`` (between two points), at the frames
      that it has seen, padding left out.

    Nothing is opened before something is written. In a process that it was sent to, such as a worker, a logger writes
    into a folder of its own, ``log_dir/process-PID``. Several threads may use it.

    Args:
        log_dir: folder, made where needed.
        prefix: of the names of curves, where the logger is called as a function.
        every_s: seconds between two calls that write; those in between are dropped (of batches, frames and episodes are
            counted all the same).

    Raises:
        ValueError: ``every_s`` is negative.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, prefix: str = "collector", every_s: float = 0.0) -> None:
        if not every_s >= 0:
            raise ValueError(f"every_s: expected 0 or more seconds, got {every_s!r}.")
        self.log_dir, self.prefix, self.every_s = Path(log_dir), prefix, every_s
        self._home = os.getpid()
        self._forget()

    def _forget(self) -> None:
        """Begin as in a process that has written nothing."""
        self._sink: Any = None
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._written_at = self._begun_at = -float("inf")
        self._frames = self._frames_before = self._episodes = 0

    # What a logger defines --------------------------------------------------------------------

    @abstractmethod
    def _open(self, folder: Path) -> Any:
        """Open what is written to, in this process."""

    @abstractmethod
    def _write(self, sink: Any, values: dict[str, float], step: int) -> None:
        """Write numbers."""

    @abstractmethod
    def _write_video(self, sink: Any, name: str, frames: NDArray[np.uint8], step: int, fps: float) -> None:
        """Write frames ``[T, H, W, 3]``."""

    @abstractmethod
    def _close(self, sink: Any) -> None:
        """Close what :meth:`_open` has opened."""

    # What its users call ----------------------------------------------------------------------

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers.

        Args:
            values: numbers by name; of nested dictionaries and lists, each at its path. What is no number is left out.
            step: where on the axis they belong; None: at their ``"frames"``, or at 0.

        Raises:
            OSError: the disk is full or failing.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{type(self).__name__}.log: expected numbers by name, got {type(values).__name__}. Pass for example "
                "{'loss': 0.1}."
            )
        numbers = dict(numbers_in(values))
        with self._ready() as sink:
            self._write(sink, numbers, _step_of(values) if step is None else int(step))

    def log_video(self, name: str, frames: Any, step: int | None = None, fps: float = 30.0) -> None:
        """Write a video.

        Args:
            name: of the video.
            frames: ``[T, C, H, W]``, or ``[N, T, C, H, W]`` for videos side by side; one or three channels, integers
                from 0 to 255 or floats from 0 to 1.
            step: where on the axis it belongs; None: 0.
            fps: frames per second.

        Raises:
            ValueError: the frames have another shape.
            MissingExtraError: imageio is not installed.
        """
        shown = as_frames("frames", frames)
        with self._ready() as sink:
            self._write_video(sink, name, shown, step or 0, float(fps))

    def __call__(self, found: Mapping[str, Any] | TensorDictBase) -> None:
        """Write the numbers in ``found``.

        Args:
            found: what ``collector.stats()`` returned, what an :class:`~rollwright.collectors.Evaluator` found, or a
                batch ``[*env, T]``.

        Raises:
            TypeError: it is neither.
            OSError: the disk is full or failing.
        """
        if isinstance(found, TensorDictBase):
            self._see_batch(found)
        elif isinstance(found, Mapping):
            if self._due():
                self._log_named(found, _step_of(found))
        else:
            raise TypeError(
                f"{type(self).__name__}: expected collector.stats() or a batch, got {type(found).__name__}. Call it "
                "with one of them, or pass it as post_collect_hook."
            )

    def close(self) -> None:
        """Write what is left and close files; a later call begins others. May be called again."""
        if self._pid == os.getpid():
            with self._lock:
                sink, self._sink = self._sink, None
                if sink is not None:
                    self._close(sink)

    # Inside -----------------------------------------------------------------------------------

    @contextmanager
    def _ready(self) -> Iterator[Any]:
        """What is written to in this process, for one thread at a time."""
        if self._pid != os.getpid():
            self._forget()  # this process was forked, and what is open is its parent's
        with self._lock:
            yield self._opened()

    def _opened(self) -> Any:
        """What :meth:`_open` has opened, or opens now."""
        if self._sink is None:
            folder = self.log_dir if os.getpid() == self._home else self.log_dir / f"process-{os.getpid()}"
            folder.mkdir(parents=True, exist_ok=True)
            self._sink = self._open(folder)
        return self._sink

    def _due(self) -> bool:
        return time.monotonic() - self._written_at >= self.every_s

    def _log_named(self, found: Mapping[str, Any], step: int) -> None:
        self.log({self.prefix: found} if self.prefix else found, step)
        self._written_at = time.monotonic()

    def _see_batch(self, batch: TensorDictBase) -> None:
        now = time.monotonic()
        batch = _taken(batch)
        self._frames += batch.numel()
        done = batch.get(("next", "done"), None)
        self._episodes += 0 if done is None else int(done.sum())
        if not self._due():
            return
        found: dict[str, float] = {"episodes_ended": self._episodes}
        reward, version = (batch.get(key, None) for key in (("next", "reward"), "policy_version"))
        if isinstance(reward, torch.Tensor) and reward.numel():
            found["reward"] = reward.double().mean().item()
        if isinstance(version, torch.Tensor) and version.numel():
            found["policy_version"] = version.max().item()
        if self._begun_at > -float("inf"):
            found["frames_per_second"] = (self._frames - self._frames_before) / max(now - self._begun_at, 1e-9)
        self._begun_at, self._frames_before, self._episodes = now, self._frames, 0
        self._log_named(found, self._frames)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def _step_of(found: Mapping[str, Any]) -> int:
    """Where on the axis numbers belong: at the frames collected, or at the step that an evaluation is of."""
    for name, value in found.items():
        if value is not None and (name == "frames" or name.endswith("/step")):
            return int(value)
    return 0


def _taken(batch: TensorDictBase) -> TensorDictBase:
    """What is logged of the frames that were taken: padding, and what an interrupted rollout lacks, is left out."""
    read = batch.select(("next", "done"), ("next", "reward"), "policy_version", strict=False)
    mask, ids = batch.get(MASK, None), batch.get(TRAJ_IDS, None)
    taken = mask if mask is not None else None if ids is None else ids >= 0
    return read if taken is None or bool(taken.all()) else read[taken.reshape(read.batch_size)]


def numbers_in(found: Mapping[str, Any] | Sequence[Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Names and values of all numbers in nested dictionaries and lists; flags are 0 and 1.

    Numbers of NumPy, and tensors of one element, are numbers, too.

    Example:
        >>> list(numbers_in({"frames": 3, "who": "me", "alive": True, "workers": [{"frames": 1}, {"frames": 2}]}))
        [('frames', 3), ('alive', 1), ('workers/0/frames', 1), ('workers/1/frames', 2)]
    """
    for name, value in found.items() if isinstance(found, Mapping) else enumerate(found):
        place = f"{path}/{name}" if path else str(name)
        if isinstance(value, torch.Tensor | np.generic | np.ndarray) and math.prod(value.shape) == 1:
            value = value.item()
        if isinstance(value, int | float):
            yield place, int(value) if isinstance(value, bool) else value
        elif isinstance(value, Mapping | list | tuple):
            yield from numbers_in(value, place)


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


class WandbLogger(StatsLogger):
    """Writes into a run of Weights & Biases.

    The axis of all curves is ``step``, so that points may come in any order: those of a collector at its frames, those
    of an evaluation at the step that it is of. The run begins with the first point, and ends with :meth:`close`.

    Args:
        log_dir: folder of the run's files, made where needed.
        project: that the run belongs to.
        name: of the run; None: W&B makes one up.
        mode: ``"online"``, ``"offline"`` (files alone; ``wandb sync`` sends them later) or ``"disabled"``; None: what
            ``WANDB_MODE`` says, else online.
        config: settings to show beside the run.
        prefix: of the names of curves, where the logger is called as a function.
        every_s: seconds between two calls that write; see :class:`StatsLogger`.

    Raises:
        MissingExtraError: wandb is not installed.
        ValueError: ``every_s`` is negative, or ``mode`` is unknown.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = ".",
        *,
        project: str = "rollwright",
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        config: Mapping[str, Any] | None = None,
        prefix: str = "collector",
        every_s: float = 0.0,
    ) -> None:
        super().__init__(log_dir, prefix=prefix, every_s=every_s)
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(f"mode: expected 'online', 'offline', 'disabled' or None, got {mode!r}.")
        self.project, self.name, self.mode = project, name, mode
        self.config = None if config is None else dict(config)
        _wandb()

    @property
    def run(self) -> Any:
        """The run of W&B in this process, for whatever else it offers."""
        with self._ready() as run:
            return run

    def _open(self, folder: Path) -> Any:
        run = _wandb().init(
            dir=str(folder),
            project=self.project,
            name=self.name,
            mode=self.mode,
            config=self.config,
            reinit="create_new",
        )
        run.define_metric("*", step_metric="step")
        return run

    def _write(self, sink: Any, values: dict[str, float], step: int) -> None:
        sink.log({**values, "step": step})

    def _write_video(self, sink: Any, name: str, frames: NDArray[np.uint8], step: int, fps: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.gif"
            save_video(path, frames, fps)
            sink.log({name: _wandb().Video(str(path), format="gif"), "step": step})  # copies the file

    def _close(self, sink: Any) -> None:
        sink.finish()


def _wandb() -> Any:
    return require("wandb", extra="wandb", purpose="WandbLogger")


_MOST_IN_A_CALL = 1000  # that servers take
_NOT_IN_NAMES = re.compile(r"[^\w\-./: ]")


class _Run(NamedTuple):
    client: Any
    id: str


class MLflowLogger(StatsLogger):
    """Writes into a run of MLflow: numbers as metrics, videos as artifacts below ``videos``.

    The run begins with the first point, and ends with :meth:`close`.

    Args:
        log_dir: folder of a local store, made where needed (to show it, newer versions of MLflow want
            ``MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri FOLDER``); or an address, such as
            ``"http://localhost:5000"`` or ``"sqlite:///mlflow.db"``.
        experiment: that the run belongs to, made where needed.
        run_name: of the run; None: MLflow makes one up.
        prefix: of the names of metrics, where the logger is called as a function.
        every_s: seconds between two calls that write; see :class:`StatsLogger`.

    Raises:
        MissingExtraError: mlflow is not installed.
        ValueError: ``every_s`` is negative.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "mlruns",
        *,
        experiment: str = "rollwright",
        run_name: str | None = None,
        prefix: str = "collector",
        every_s: float = 0.0,
    ) -> None:
        super().__init__(log_dir, prefix=prefix, every_s=every_s)
        self._address = str(log_dir) if "://" in str(log_dir) else None
        self.experiment, self.run_name = experiment, run_name
        _mlflow()

    @property
    def run_id(self) -> str:
        """Of the run in this process."""
        with self._ready() as run:
            return str(run.id)

    def _opened(self) -> Any:
        if self._address is None:
            return super()._opened()
        if self._sink is None:
            self._sink = self._open(self.log_dir)
        return self._sink

    def _open(self, folder: Path) -> Any:
        if self._address is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want to be asked for one
        client = _mlflow().MlflowClient(tracking_uri=self._address or folder.absolute().as_uri())
        found = client.get_experiment_by_name(self.experiment)
        number = client.create_experiment(self.experiment) if found is None else found.experiment_id
        return _Run(client, client.create_run(number, run_name=self.run_name).info.run_id)

    def _write(self, sink: Any, values: dict[str, float], step: int) -> None:
        metric, now = _mlflow().entities.Metric, int(time.time() * 1000)
        points = [metric(_NOT_IN_NAMES.sub("_", name), float(value), now, step) for name, value in values.items()]
        for first in range(0, len(points), _MOST_IN_A_CALL):
            sink.client.log_batch(sink.id, metrics=points[first : first + _MOST_IN_A_CALL])

    def _write_video(self, sink: Any, name: str, frames: NDArray[np.uint8], step: int, fps: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = VideoFiles(folder).log_video(name.replace("/", "_"), frames.transpose(0, 3, 1, 2), step, fps)
            sink.client.log_artifact(sink.id, str(path), "videos")

    def _close(self, sink: Any) -> None:
        sink.client.set_terminated(sink.id)


def _mlflow() -> Any:
    return require("mlflow", extra="mlflow", purpose="MLflowLogger")
