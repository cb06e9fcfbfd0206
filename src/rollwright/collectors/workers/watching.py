"""Watch: which workers are stuck."""

from __future__ import annotations

import time

from rollwright._processes.child import STOPPED_S
from rollwright.collectors.workers.counters import BEAT_S, State
from rollwright.collectors.workers.member import Member
from rollwright.errors import WorkerError

__all__ = ["ASIDE_S", "START_S", "Watch", "failure_of"]

START_S = 120.0  # for a worker to make its environment and its policy
ASIDE_S = 120.0  # in one call, or to take weights: whoever called has given up before
_MISSED_BEATS = 10  # of one that waits, beyond the limit of a step


class Watch:
    """Tells of workers that do one thing for too long.

    Limited are: the start, a call (:meth:`MultiCollector.map_fn` and the like), taking weights, and one step or the
    reset that a rollout begins with, if that was asked for. Hooks, and waiting for the consumer, are not. A worker that
    waits to be asked, and gives no sign of life, is stuck, too; so is one that a signal has stopped, whatever it does.

    Time between two looks counts for half of a limit at most: this process may have been stopped, with its workers.

    Args:
        step_timeout_s: of one step or reset; None: no limit.
    """

    def __init__(self, step_timeout_s: float | None) -> None:
        self._step_timeout_s = step_timeout_s
        self._silence_s = STOPPED_S if step_timeout_s is None else step_timeout_s + _MISSED_BEATS * BEAT_S

    def failure(self, worker: Member) -> WorkerError | None:
        """Why a worker has failed, if it is stuck; to be asked now and then."""
        now, pulse, state = time.monotonic(), worker.words.pulse, worker.words.state
        gap, worker.looked_at = now - worker.looked_at, now
        if worker.child is None:
            return None
        limit = START_S if worker.ready is None else self._limit(state)
        if limit is None or (pulse != worker.pulse and worker.ready is not None):
            worker.pulse, worker.pulse_at = pulse, now
        else:
            worker.pulse_at += max(0.0, min(gap, now - worker.pulse_at) - limit / 2)
            if now - worker.pulse_at > limit:
                return failure_of(worker, self._why(worker, state, limit))
        if worker.child.stopped_s() > self._silence_s:
            return failure_of(worker, f"was stopped by a signal, and did not go on for {self._silence_s:g} s")
        return None

    def _limit(self, state: State) -> float | None:
        if state is State.COLLECTING:
            return self._step_timeout_s
        if state in (State.WAITING, State.PAUSED):
            return self._silence_s
        return ASIDE_S if state in (State.CALLED, State.TAKING_WEIGHTS) else None

    def _why(self, worker: Member, state: State, limit: float) -> str:
        if worker.ready is None:
            return f"has taken longer than {limit:g} s to make its environment"
        if state is State.COLLECTING:
            return (
                f"has taken longer than env_step_timeout={limit:g} s for one step (number {worker.pulse[0] + 1:,} of "
                "its life), or for the reset before it. Make the environment's step and reset bounded, or raise the "
                "limit"
            )
        if state in (State.WAITING, State.PAUSED):
            return f"has given no sign of life for {limit:g} s, while it waited to be asked"
        if state is State.CALLED:
            return f"has taken longer than {limit:g} s to call {worker.called!r}. Call what returns sooner"
        return (
            f"has taken longer than {limit:g} s to take weights that were published. Look for what the policy does "
            "when its state is loaded"
        )


def failure_of(worker: Member, what: str) -> WorkerError:
    """An error that names a worker."""
    error = WorkerError(f"{worker.name} {what}.")
    error.worker = worker.index
    return error
