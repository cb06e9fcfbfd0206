"""One worker in the collector's process: its state, whether it is stuck, and its replacement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollwright._processes.child import STOPPED_S
from rollwright._processes.connection import Connection, Heartbeats, RestartPolicy
from rollwright._processes.pool import Pool
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.counters import BEAT_S, DeliveredPosition, WorkerCounters, WorkerState
from rollwright.collectors.workers.memory import Block
from rollwright.errors import ServiceLostError, WorkerError

if TYPE_CHECKING:
    from rollwright.collectors.workers.worker import WorkerSpec


class WorkerHandle:
    """The state of one worker, as its collector knows it.

    Args:
        spec: what it is made of.
        pool: its connection is the one of place ``spec.index``.

    Attributes:
        index: its number.
        spec: see above.
        counters: numbers that it writes.
        ready: what it has sent of itself; None while it starts.
        runs: rollouts that it was asked for and has not answered, in order, with their blocks.
        error: why it is gone for good.
        num_collected: rollouts of it that have arrived.
        called: what it was asked to call last.
        place: where in its data who takes its place begins.
        of_path: what its path added to ``stats()`` at the end of its last rollout.
    """

    def __init__(self, spec: WorkerSpec, pool: Pool) -> None:
        self.index, self.spec, self._pool = spec.index, spec, pool
        self.counters = WorkerCounters(spec.counters, spec.index)
        self.ready: messages.Ready | None = None
        self.runs: dict[int, Block | None] = {}
        self.error: WorkerError | None = None
        self.num_collected = 0
        self.of_path: Mapping[str, Any] = {}
        self._answered = threading.local()
        self.called = ""
        self.place = DeliveredPosition(self.counters, spec.options)
        self._last: Connection | None = None

    @property
    def connection(self) -> Connection | None:
        """To its process; None: it is gone."""
        return self._pool.by_place[self.index]

    def started(self, connection: Connection) -> None:
        """Another process takes this place."""
        self._last = connection
        self._pool.add(self.index, connection)

    def remote_clock(self) -> float | None:
        """Of the machine that it runs on, where that is another; see :class:`Connection`."""
        connection = self.connection
        return None if connection is None or connection.host is None else connection.clock()

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        connection = self.connection
        return connection is not None and not connection.wait(0.0)

    @property
    def pid(self) -> int | None:
        """Of its process, on its machine."""
        connection = self.connection
        return None if connection is None else connection.pid

    @property
    def available(self) -> bool:
        """Whether it has started, and is not gone."""
        return self.ready is not None and self.connection is not None

    @property
    def threads(self) -> int | None:
        """That torch uses in it."""
        return None if self.ready is None else self.ready.threads

    @property
    def name(self) -> str:
        """For messages."""
        host = None if self._last is None else self._last.host
        return f"worker {self.index}" if host is None else f"worker {self.index} on {host}"

    @property
    def num_at_answer(self) -> int:
        """Rollouts of it that had arrived when it answered the last call of this thread."""
        return getattr(self._answered, "num", 0)

    @num_at_answer.setter
    def num_at_answer(self, num: int) -> None:
        self._answered.num = num

    def send(self, message: Any, *, attention: bool = False) -> None:
        """Send a message without waiting.

        Args:
            message: one of :mod:`~rollwright.collectors.workers.messages`.
            attention: have it read after the current step; otherwise, after the rollout.
        """
        self._pool.send(self.index, message)
        if attention:
            self.counters.call_attention()

    def failed(self, what: str) -> WorkerError:
        """An error that names it."""
        error = WorkerError(f"{self.name} {what}.")
        error.worker = self.index
        return error

    def doing(self) -> str:
        """A phrase for messages."""
        if self.error is not None:
            return f"{self.name} has failed"
        return f"{self.name} is {self.counters.state.name.lower().replace('_', ' ')}"


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

    def failure(self, worker: WorkerHandle) -> WorkerError | None:
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

    def _why(self, worker: WorkerHandle, state: WorkerState, limit: float) -> str:
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


_ADVICE = (
    "Look for what ends it in its environment or policy (memory, a signal, a crash of native code, a step without an "
    "end), or pass on_worker_failure='restart' to go on with another in its place."
)


class Restarts:
    """Keeps account of replacements.

    Args:
        wanted: whether workers are replaced.
        most: how often each, see :class:`~rollwright._processes.connection.RestartPolicy`.
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
