"""Observers: loggers and a progress bar that follow what a collector delivers, its report for others; and traces."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from rollwright._processes.forks import ExitStage, call_at_exit, cancel_at_exit
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


Call = TypeVar("Call", bound=Callable[..., Any])
_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}


def ranges_enabled() -> bool:
    """Whether ``ROLLWRIGHT_PROFILING=1`` is set; read when a collector is constructed."""
    return os.environ.get("ROLLWRIGHT_PROFILING", "0") not in ("", "0")


def named_range(name: str, call: Call) -> Call:
    """``call`` inside a range that profilers show as ``name``; ``call`` itself where ranges are off."""
    if not ranges_enabled():
        return call

    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return call(*args, **kwargs)

    return ranged  # type: ignore[return-value]


@dataclass(frozen=True)
class ProfileConfig:
    """What :meth:`~rollwright.collectors.BaseCollector.enable_profile` records.

    Attributes:
        workers: indices of the workers to profile; a collector of one process ignores it.
        num_rollouts: rollouts under the profiler, those that warm up included.
        warmup_rollouts: first rollouts, whose events are thrown away.
        save_path: file of the Chrome trace; ``{worker_idx}`` stands for the worker's index.
            None: ``./collector_profile_{worker_idx}.json``.
        activities: of ``"cpu"`` and ``"cuda"``; the latter is left out where there is no GPU.
        record_shapes: record the shapes of operators' inputs.
        profile_memory: record allocations.
        with_stack: record Python stacks.
        with_flops: estimate operations.
        on_trace_ready: called with the profiler instead of writing ``save_path``.

    Example:
        >>> ProfileConfig(num_rollouts=1, warmup_rollouts=1)
        Traceback (most recent call last):
        ...
        ValueError: num_rollouts: expected more than warmup_rollouts=1, got 1. Raise it, or warm up less.
    """

    workers: list[int] = field(default_factory=lambda: [0])
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    activities: list[str] = field(default_factory=lambda: ["cpu", "cuda"])
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if self.warmup_rollouts < 0:
            raise ValueError(f"warmup_rollouts: expected at least 0, got {self.warmup_rollouts}.")
        if self.num_rollouts <= self.warmup_rollouts:
            raise ValueError(
                f"num_rollouts: expected more than warmup_rollouts={self.warmup_rollouts}, got {self.num_rollouts}. "
                "Raise it, or warm up less."
            )
        unknown = set(self.activities) - set(_ACTIVITIES)
        if unknown or not self.activities:
            raise ValueError(f"activities: expected some of {sorted(_ACTIVITIES)}, got {self.activities}.")

    def get_save_path(self, worker_idx: int) -> Path:
        """The trace's file for one worker."""
        template = self.save_path if self.save_path is not None else "./collector_profile_{worker_idx}.json"
        return Path(str(template).replace("{worker_idx}", str(worker_idx)))

    def get_activities(self) -> list[ProfilerActivity]:
        """The activities that this machine can record."""
        return [_ACTIVITIES[name] for name in self.activities if name != "cuda" or torch.cuda.is_available()]


class RolloutProfiler:
    """Runs torch's profiler over the first rollouts and writes the trace.

    A collection that ends before ``num_rollouts`` still writes what it has recorded.
    """

    def __init__(self, config: ProfileConfig, worker_idx: int) -> None:
        self.config = config
        self._path = config.get_save_path(worker_idx)
        self._left = config.num_rollouts
        self._profile: Any = None

    def start(self) -> None:
        """Begin before the first rollout; does nothing once running or over."""
        if self._profile is not None or not self._left:
            return
        config = self.config
        active = config.num_rollouts - config.warmup_rollouts
        self._profile = profile(
            activities=config.get_activities(),
            schedule=schedule(wait=0, warmup=config.warmup_rollouts, active=active, repeat=1),
            on_trace_ready=config.on_trace_ready or self._export,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )
        self._profile.start()
        call_at_exit(self.stop, ExitStage.PROFILERS)  # a tracer that still runs when the interpreter goes crashes it

    def step(self) -> None:
        """Count a rollout; after the last one the trace is written."""
        if self._profile is None:
            return
        self._left -= 1
        self._profile.step()
        if not self._left:
            self.stop()

    def stop(self) -> None:
        """End now. What was recorded after the warm-up is written."""
        running, self._profile, self._left = self._profile, None, 0
        if running is not None:
            cancel_at_exit(self.stop)
            running.stop()

    def _export(self, finished: Any) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._path))


class Profile:
    """Traces of a collector: requested, running, and saved.

    Args:
        worker_idx: gives the index of the collector among its siblings.

    Attributes:
        config: what is traced; None: nothing.
        started: whether rollouts have begun.
    """

    def __init__(self, worker_idx: Callable[[], int | None] = lambda: None) -> None:
        self.config: ProfileConfig | None = None
        self.started = False
        self._worker_idx = worker_idx
        self._profiler: RolloutProfiler | None = None

    def enable(self, **config: Any) -> None:
        """Trace the first rollouts, as a :class:`ProfileConfig` of ``config`` specifies.

        Raises:
            RuntimeError: rollouts have begun.
            ValueError: ``num_rollouts`` does not exceed ``warmup_rollouts``.
        """
        if self.started:
            raise RuntimeError("enable_profile must be called before iteration begins. Call it on a new collector.")
        self.config = ProfileConfig(**config)

    def start(self) -> None:
        """A rollout begins that will be delivered."""
        self.started = True
        if self.config is not None and self._profiler is None:
            self._profiler = RolloutProfiler(self.config, self._worker_idx() or 0)
        if self._profiler is not None:
            self._profiler.start()

    def step(self) -> None:
        """A rollout was delivered."""
        if self._profiler is not None:
            self._profiler.step()

    def disable(self) -> None:
        """Trace no (further) rollouts; what was recorded is written."""
        self.config = None
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
