"""TensorBoardLogger: statistics of a collector as curves. The only module that imports tensorboard."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from rollwright.data.layout import MASK, TRAJ_IDS
from rollwright.errors import require

_EXTRA, _PURPOSE = "tensorboard", "TensorBoardLogger"


class TensorBoardLogger:
    """Writes the numbers in ``collector.stats()``, or means over batches, into a file that TensorBoard shows.

    Called with the statistics of a collector, every number in them becomes a point of a curve at their ``frames``,
    named after its place: ``collector/episodes``, ``collector/seconds/policy``, ``collector/workers/1/frames``.

    As a ``post_collect_hook``, called with batches, it writes ``reward`` (mean), ``episodes_ended`` (number),
    ``policy_version`` (the newest, where it is tracked) and ``frames_per_second`` (between two points), at the frames
    that it has seen, padding left out. In a process that it was sent to, such as a worker, it writes into a folder of
    its own, ``log_dir/process-PID``.

    A file is made with the first point. Each call writes its points to disk; no thread is started.

    Args:
        log_dir: folder, made where needed.
        prefix: of the names of curves.
        every_s: seconds between two calls that write; those in between are dropped (of batches, frames and episodes are
            counted all the same).

    Raises:
        MissingExtraError: tensorboard is not installed.
        ValueError: ``every_s`` is negative.

    Example:
        >>> import tempfile
        >>> from rollwright.collectors import Collector
        >>> from rollwright.envs import GymEnv
        >>> folder = tempfile.TemporaryDirectory()
        >>> with TensorBoardLogger(folder.name) as log, Collector(GymEnv("CartPole-v1"), total_frames=400) as collector:
        ...     for batch in collector:
        ...         log(collector.stats())
        >>> [path.name.split(".")[:3] for path in Path(folder.name).iterdir()]
        [['events', 'out', 'tfevents']]
        >>> folder.cleanup()
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, prefix: str = "collector", every_s: float = 0.0) -> None:
        if not every_s >= 0:
            raise ValueError(f"every_s: expected 0 or more seconds, got {every_s!r}.")
        require("tensorboard.summary.writer.record_writer", extra=_EXTRA, purpose=_PURPOSE)
        self.log_dir, self.prefix, self.every_s = Path(log_dir), prefix, every_s
        self._home = os.getpid()
        self._forget()

    def _forget(self) -> None:
        """Begin as in a process that has written nothing."""
        self._writer: Any = None
        self._writer_pid = 0
        self._written_at = self._begun_at = -float("inf")
        self._frames = self._frames_before = self._episodes = 0

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
                self._write(numbers_in(found), _step_of(found))
        else:
            raise TypeError(
                f"TensorBoardLogger: expected collector.stats() or a batch, got {type(found).__name__}. Call it with "
                "one of them, or pass it as post_collect_hook."
            )

    def _due(self) -> bool:
        return time.monotonic() - self._written_at >= self.every_s

    # Batches ----------------------------------------------------------------------------------

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
        self._write(found.items(), self._frames)

    # The file ---------------------------------------------------------------------------------

    def _write(self, numbers: Any, step: int) -> None:
        summaries = require("tensorboard.compat.proto.summary_pb2", extra=_EXTRA, purpose=_PURPOSE)
        values = [
            summaries.Summary.Value(tag=f"{self.prefix}/{name}" if self.prefix else name, simple_value=value)
            for name, value in numbers
        ]
        self._event(step=step, summary=summaries.Summary(value=values))
        self._written_at = time.monotonic()

    def _event(self, **content: Any) -> None:
        events = require("tensorboard.compat.proto.event_pb2", extra=_EXTRA, purpose=_PURPOSE)
        if self._writer is not None and self._writer_pid != os.getpid():
            self._forget()  # this process was forked, and the file is its parent's
        if self._writer is None:
            folder = self.log_dir if os.getpid() == self._home else self.log_dir / f"process-{os.getpid()}"
            folder.mkdir(parents=True, exist_ok=True)
            writers = require("tensorboard.summary.writer.record_writer", extra=_EXTRA, purpose=_PURPOSE)
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
            self._writer = writers.RecordWriter(open(folder / name, "xb"))  # noqa: SIM115 - kept open
            self._writer_pid = os.getpid()
            self._event(file_version="brain.Event:2")
        self._writer.write(events.Event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        """Close the file; a later call begins another. May be called again."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"log_dir": self.log_dir, "prefix": self.prefix, "every_s": self.every_s, "_home": self._home}

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

    Example:
        >>> list(numbers_in({"frames": 3, "who": "me", "alive": True, "workers": [{"frames": 1}, {"frames": 2}]}))
        [('frames', 3), ('alive', 1), ('workers/0/frames', 1), ('workers/1/frames', 2)]
    """
    for name, value in found.items() if isinstance(found, Mapping) else enumerate(found):
        place = f"{path}/{name}" if path else str(name)
        if isinstance(value, int | float):
            yield place, int(value) if isinstance(value, bool) else value
        elif isinstance(value, Mapping | list | tuple):
            yield from numbers_in(value, place)
