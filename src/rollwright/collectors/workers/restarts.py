"""Restarts: whether a worker that failed is replaced, how often, and when."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollwright.errors import WorkerError

__all__ = ["Restarts"]

_LONGEST_S = 60.0
_HEALTHY = 10.0  # times the last delay
_ADVICE = (
    "Look for what ends it in its environment or policy (memory, a signal, a crash of native code, a step without an "
    "end), or pass on_worker_failure='restart' to go on with another in its place."
)


class Restarts:
    """Keeps account of replacements.

    The first of a worker comes after ``delay_s`` seconds, each further one after twice as long as the last, a minute at
    most. One that was at work for more than ten times its last delay is taken to be healthy: if it fails after that,
    the delay is ``delay_s`` again. ``most`` counts all replacements of a worker, healthy or not.

    Args:
        wanted: whether workers are replaced.
        most: how often each.
        delay_s: before the first.
        clock: seconds.

    Attributes:
        counts: how often each was replaced.
        notes: what users are to be told.

    Example:
        >>> restarts = Restarts(wanted=False)
        >>> restarts.plan(0, WorkerError("worker 0 was killed"))
        False
    """

    def __init__(
        self, *, wanted: bool, most: int = 3, delay_s: float = 0.1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.wanted, self._most, self._delay_s, self._clock = wanted, most, delay_s, clock
        self.counts: dict[int, int] = {}
        self.notes: list[str] = []
        self._errors: dict[int, WorkerError] = {}
        self._delays: dict[int, float] = {}  # the last of each
        self._began: dict[int, float] = {}
        self._at: dict[int, float] = {}

    def began(self, worker: int) -> None:
        """Note that a worker has made what it needs, and is at work."""
        self._began[worker] = self._clock()

    def plan(self, worker: int, error: WorkerError) -> bool:
        """Note a failure; whether another worker will come in place of this one."""
        self._errors[worker] = error
        done = self.counts.get(worker, 0)
        if not self.wanted or done >= self._most:
            return False
        self.counts[worker] = done + 1
        delay = self._delays[worker] = self._next_delay(worker)
        self._at[worker] = self._clock() + delay
        self.notes.append(
            f"{_sentence(error)} It is replaced in {delay:.3g} s (number {done + 1} of {self._most} at most); its "
            "unfinished trajectories end here, and others begin under new ids."
        )
        return True

    def _next_delay(self, worker: int) -> float:
        last, began = self._delays.get(worker), self._began.pop(worker, None)
        if last is None or (began is not None and self._clock() - began > _HEALTHY * last):
            return self._delay_s
        return min(_LONGEST_S, 2 * last)

    def verdict(self, worker: int, error: WorkerError) -> WorkerError:
        """What is raised of a worker that is not replaced."""
        if not self.wanted and error.remote_type:
            return error
        if not self.wanted:
            error.args = (f"{_sentence(error)} {_ADVICE}",)
            return error
        told = WorkerError(
            f"{_sentence(error)} It was replaced {self._most} times before (max_restarts), and is not any more."
        )
        told.worker, told.remote_type, told.__cause__ = worker, error.remote_type, error
        return told

    def last_error(self, worker: int) -> WorkerError:
        """Why a worker was replaced last."""
        return self._errors[worker]

    def due(self) -> list[int]:
        """Workers to start now; each is named once."""
        now = self._clock()
        found = [worker for worker, at in self._at.items() if at <= now]
        for worker in found:
            del self._at[worker]
        return found

    def next_in(self) -> float:
        """Seconds until one is due."""
        return max(0.0, min(self._at.values(), default=float("inf")) - self._clock())


def _sentence(error: WorkerError) -> str:
    text = str(error)
    return text if text.endswith((".", "!", "?")) else f"{text}."
