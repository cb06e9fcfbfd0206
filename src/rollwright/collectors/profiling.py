"""Profiling: named ranges inside a rollout, and traces of whole rollouts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from rollwright._processes.forks import ExitStage, call_at_exit, cancel_at_exit

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

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Whether a worker is to be profiled."""
        return worker_idx in self.workers


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
