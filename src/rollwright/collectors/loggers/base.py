"""Logger, what writes numbers and videos; and what all loggers of this package share."""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._video import as_frames
from rollwright.data.layout import MASK, TRAJ_IDS

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
