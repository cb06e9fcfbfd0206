"""Watch: which workers are stuck."""

from __future__ import annotations

import time

from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.words import State
from rollwright.errors import WorkerError

__all__ = ["ASIDE_S", "START_S", "Watch", "failure_of"]

START_S = 120.0  # for a worker to make its environment and its policy
ASIDE_S = 120.0  # in one call, or to take weights: whoever called has given up before


class Watch:
    """Tells of workers that do one thing for too long.

    Limited are: the start, a call (:meth:`MultiCollector.map_fn` and the like), taking weights, and one step or the
    reset that a rollout begins with, if that was asked for. Hooks, and waiting for the consumer, are not.

    Args:
        step_timeout_s: of one step or reset; None: no limit.
    """

    def __init__(self, step_timeout_s: float | None) -> None:
        self._step_timeout_s = step_timeout_s

    def failure(self, worker: Member) -> WorkerError | None:
        """Why a worker has failed, if it is stuck; to be asked now and then."""
        now, pulse, state = time.monotonic(), worker.words.pulse, worker.words.state
        if worker.child is None:
            return None
        if worker.ready is None:
            late = now - worker.pulse_at > START_S
            return failure_of(worker, f"has taken longer than {START_S:g} s to make its environment") if late else None
        limit = self._limit(state)
        if limit is None or pulse != worker.pulse:
            worker.pulse, worker.pulse_at = pulse, now
        elif now - worker.pulse_at > limit:
            return failure_of(worker, self._why(worker, state, limit))
        return None

    def _limit(self, state: State) -> float | None:
        if state is State.COLLECTING:
            return self._step_timeout_s
        return ASIDE_S if state in (State.CALLED, State.TAKING_WEIGHTS) else None

    def _why(self, worker: Member, state: State, limit: float) -> str:
        if state is State.COLLECTING:
            return (
                f"has taken longer than env_step_timeout={limit:g} s for one step (number {worker.pulse[0] + 1:,} of "
                "its life), or for the reset before it. Make the environment's step and reset bounded, or raise the "
                "limit"
            )
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
