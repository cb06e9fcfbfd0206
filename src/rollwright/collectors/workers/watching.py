"""Watchdog: finds workers that are stuck."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollwright._processes.child import STOPPED_S
from rollwright._processes.health import Heartbeats
from rollwright.collectors.workers.counters import BEAT_S, WorkerState
from rollwright.collectors.workers.member import Member
from rollwright.errors import WorkerError

START_S = 120.0  # for a worker to make its environment and its policy, by default
ASIDE_S = 120.0  # in one call, or to take weights: whoever called has timed out before
_MISSED_BEATS = 10  # of one that waits, beyond the limit of a step


class Watchdog:
    """Finds workers that do one thing for too long.

    Limited are: the start, a call (:meth:`MultiCollector.map_fn` and the like), taking weights, and one step or the
    reset that a rollout begins with, if that was asked for. Hooks, and waiting for the consumer, are not. A worker that
    waits to be asked, and gives no sign of life, is stuck, too; so is one that a signal has stopped, whatever it does.

    Args:
        step_timeout_s: of one step or reset; None: no limit.
        clock: seconds.
        start_timeout_s: for a worker to make its environment and its policy.

    Attributes:
        heartbeats: of the workers.
    """

    def __init__(
        self,
        step_timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        start_timeout_s: float = START_S,
    ) -> None:
        self._step_timeout_s, self.start_timeout_s = step_timeout_s, start_timeout_s
        self.heartbeats = Heartbeats(clock)
        self._silence_s = STOPPED_S if step_timeout_s is None else step_timeout_s + _MISSED_BEATS * BEAT_S

    def failure(self, worker: Member) -> WorkerError | None:
        """Why a worker has failed, if it is stuck; to be asked now and then."""
        connection = worker.connection
        if connection is None:
            return None
        state, starts = worker.counters.state, worker.ready is None
        limit = self.start_timeout_s if starts else self._limit(state)
        pulse = None if starts else worker.counters.pulse
        if self.heartbeats.is_silent(worker.index, pulse, limit, worker.remote_clock()):
            return worker.failed(self._why(worker, state, limit or 0.0))
        if connection.stopped_s() > self._silence_s:
            return worker.failed(f"was stopped by a signal, and did not go on for {self._silence_s:g} s")
        return None

    def _limit(self, state: WorkerState) -> float | None:
        if state is WorkerState.COLLECTING:
            return self._step_timeout_s
        if state in (WorkerState.WAITING, WorkerState.PAUSED):
            return self._silence_s
        return ASIDE_S if state in (WorkerState.CALLED, WorkerState.TAKING_WEIGHTS) else None

    def _why(self, worker: Member, state: WorkerState, limit: float) -> str:
        if worker.ready is None:
            return f"has taken longer than start_timeout={limit:g} s to make its environment and its policy"
        if state is WorkerState.COLLECTING:
            step, waits = worker.counters.pulse[0] + 1, worker.counters.waits()
            if waits:
                return (
                    f"has taken longer than env_step_timeout={limit:g} s for one step (number {step:,} of its life). "
                    f"It waits for what follows the answer in {waits}. Give tools, rewards and replies a limit below "
                    "that (timeout_s=, reply_timeout_s=), or raise the limit"
                )
            return (
                f"has taken longer than env_step_timeout={limit:g} s for one step (number {step:,} of its life), or "
                "for the reset before it. Make the environment's step and reset bounded, or raise the limit"
            )
        if state in (WorkerState.WAITING, WorkerState.PAUSED):
            return f"has given no sign of life for {limit:g} s, while it waited to be asked"
        if state is WorkerState.CALLED:
            return f"has taken longer than {limit:g} s to call {worker.called!r}. Call what returns sooner"
        return (
            f"has taken longer than {limit:g} s to take weights that were published. Look for what the policy does "
            "when its state is loaded"
        )
