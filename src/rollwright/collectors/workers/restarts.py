"""Restarts: replaces workers that failed, and warns of it."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollwright._processes.health import RestartPolicy
from rollwright.errors import ServiceLostError, WorkerError

_ADVICE = (
    "Look for what ends it in its environment or policy (memory, a signal, a crash of native code, a step without an "
    "end), or pass on_worker_failure='restart' to go on with another in its place."
)


class Restarts:
    """Keeps account of replacements.

    Args:
        wanted: whether workers are replaced.
        most: how often each, see :class:`~rollwright._processes.health.RestartPolicy`.
        delay_s: before the first.
        clock: seconds.

    Attributes:
        counts: how often each was replaced.
        notes: warnings for the user.

    Example:
        >>> restarts = Restarts(wanted=False)
        >>> restarts.plan(0, WorkerError("worker 0 was killed"))
        False
    """

    def __init__(
        self, *, wanted: bool, most: int = 3, delay_s: float = 0.1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.wanted, self._clock = wanted, clock
        self._policy = RestartPolicy(most, delay_s=delay_s, clock=clock)
        self.counts = self._policy.counts
        self.began = self._policy.began
        self.notes: list[str] = []
        self._errors: dict[int, WorkerError] = {}
        self._at: dict[int, float] = {}

    def plan(self, worker: int, error: WorkerError, *, goes_on: bool = False) -> bool:
        """Note a failure; whether another worker will be started in place of this one.

        Args:
            worker: its index.
            error: why it failed.
            goes_on: whether the other one goes on at a place in the data.
        """
        self._errors[worker] = error
        wanted = self.wanted and not isinstance(error, ServiceLostError)
        delay = self._policy.next_delay(worker) if wanted else None
        if delay is None:
            return False
        self._at[worker] = self._clock() + delay
        then = (
            "the other one goes on behind what was delivered, and takes what was not once more"
            if goes_on
            else "its unfinished trajectories end here, and others begin under new ids"
        )
        self.notes.append(
            f"{_sentence(error)} It is replaced in {delay:.3g} s (number {self.counts[worker]} of {self._policy.most} "
            f"at most); {then}."
        )
        return True

    def verdict(self, worker: int, error: WorkerError) -> WorkerError:
        """What is raised of a worker that is not replaced."""
        if error.remote_type and (not self.wanted or isinstance(error, ServiceLostError)):
            return error
        if not self.wanted:
            error.args = (f"{_sentence(error)} {_ADVICE}",)
            return error
        final = WorkerError(
            f"{_sentence(error)} It was replaced {self._policy.most} times before (max_restarts), and is not any more."
        )
        final.worker, final.remote_type, final.__cause__ = worker, error.remote_type, error
        return final

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
