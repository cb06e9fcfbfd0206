"""Desk: a thread that carries out evaluations one at a time, and what others see of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rollwright._processes.threads import DaemonThread
from rollwright.collectors._evaluation.rounds import Order, Pulse, Stopped
from rollwright.collectors._evaluation.sides import Side
from rollwright.collectors.delivery.background import exploration_of_this_thread
from rollwright.envs.utils import ExplorationType

__all__ = ["Desk", "Ticket"]

_NAP_S = 0.5
_CLOSE_S = 5.0  # for an environment to be closed when nobody says how long


class Ticket:
    """An order, and what became of it.

    Attributes:
        order: what was asked for.
        awaited: whether the caller waits for it, and gets result or error from here.
        begun: whether the environments are seeded.
        done: whether it is over.
        result: of the evaluation, if it came to its end.
        error: what was raised, if anything was.
    """

    def __init__(self, order: Order, *, awaited: bool) -> None:
        self.order, self.awaited = order, awaited
        self.begun = self.done = False
        self.result: dict[str, Any] | None = None
        self.error: BaseException | None = None


class Desk(DaemonThread):
    """Carries out orders in a thread; all that others ask of it is asked under its lock.

    Args:
        make_side: makes what runs evaluations, in the thread.
        pulse: of the evaluation under way.
        on_result: called with each result, in the thread.
        exploration_type: that of the thread, whatever other threads set meanwhile.
        step_timeout_s: the longest silence in an evaluation.
    """

    def __init__(
        self,
        make_side: Callable[[], Side],
        pulse: Pulse,
        on_result: Callable[[dict[str, Any]], Any] | None,
        *,
        exploration_type: ExplorationType,
        step_timeout_s: float,
    ) -> None:
        super().__init__("rollwright-evaluator")
        self._make_side, self.pulse, self._on_result = make_side, pulse, on_result
        self._exploration = exploration_type
        self._step_timeout_s = step_timeout_s
        self.current: Ticket | None = None
        self.next: Ticket | None = None
        self.unread: dict[str, Any] | None = None
        self.evaluations = 0
        self.side: Side | None = None
        self._doing = "its environment and policy"
        self._close_by: float | None = None  # when its side is made to end
        self.end = "ended"

    # The thread -------------------------------------------------------------------------------

    def open(self, timeout_s: float) -> None:
        """Begin; returns when the side is made.

        Raises:
            TimeoutError: that took too long.
            Exception: what it raised.
        """
        self.pulse.begin()
        self.start()
        self.wait_until(lambda: self.side is not None or self.finished, "the Evaluator's start", timeout_s)
        self.raise_error()

    def _work(self) -> None:
        side = None
        try:
            with exploration_of_this_thread(self._exploration):
                side = self._make_side()
                with self.condition:
                    self.side = side
                    self.condition.notify_all()
                while (ticket := self._take()) is not None:
                    self._carry_out(side, ticket)
        finally:
            if side is not None:
                self.end = side.close(self._closing_time)

    def _closing_time(self) -> float:
        """When the side is made to end, if it does not by itself; a later call of :meth:`stop` may change that."""
        if self._close_by is None:
            self._close_by = time.monotonic() + _CLOSE_S
        return self._close_by

    def _finish(self) -> None:
        self.current = self.next = None

    def _take(self) -> Ticket | None:
        with self.condition:
            while not self.stopping:
                if self.next is not None:
                    self.current, self.next = self.next, None
                    self.pulse.begin()
                    self._doing = "a step of its environment"
                    return self.current
                self.condition.wait(_NAP_S)
            return None

    def _carry_out(self, side: Side, ticket: Ticket) -> None:
        try:
            ticket.result = side.run(ticket.order, lambda: self._begun(ticket))
            self.evaluations += 1
            if self._on_result is not None:
                self._doing = "on_result"
                self.pulse.beat()
                self._on_result(dict(ticket.result))
        except Stopped:
            pass
        except Exception as error:
            ticket.error = error
        with self.condition:
            if not ticket.awaited:
                self.unread = ticket.result if ticket.result is not None else self.unread
                self._error = ticket.error or self._error
            self.current, ticket.done = None, True
            self.condition.notify_all()

    def _begun(self, ticket: Ticket) -> None:
        with self.condition:
            ticket.begun = True
            self.condition.notify_all()

    # What others ask --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an evaluation runs, or is to."""
        return self.current is not None or self.next is not None

    def put(self, ticket: Ticket) -> bool:
        """Have an order carried out next; returns whether another one that waited has lost its place."""
        with self.condition:
            lost, self.next = self.next, ticket
            if lost is not None:
                lost.done = True
                lost.error = RuntimeError("the evaluation was replaced by a newer one before it began")
            self.condition.notify_all()
            return lost is not None

    def read(self) -> dict[str, Any] | None:
        """The newest result that nobody has read."""
        with self.condition:
            unread, self.unread = self.unread, None
            return unread

    def raise_error(self) -> None:
        """Raise what went wrong, once; and what stands against further evaluations, each time."""
        super().raise_error()
        ended = None if self.side is None or self.current is not None or self.stopping else self.side.ended()
        if ended is not None:
            raise ended

    def check_lively(self) -> None:
        """Raise where an evaluation has been silent for too long.

        Raises:
            TimeoutError: says what it does.
        """
        # A process is killed when it is silent, and its error comes a little later.
        limit = self._step_timeout_s + (0.0 if self.side is None or self.side.pid is None else 5.0)
        current = self.current  # the thread may be through with it meanwhile
        if current is not None and self.pulse.silence_s > limit:
            raise TimeoutError(
                f"evaluation of step {current.order.step}: waited {self.pulse.silence_s:.1f} s for {self._doing}, "
                f"after {self.pulse.frames} frames. Look there for what blocks, or raise env_step_timeout."
            )

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float | None) -> None:
        """Wait, as long as the evaluation under way gives signs of life.

        Args:
            condition: asked under the lock.
            what: is waited for, for the message.
            timeout_s: the limit; None: none but that.

        Raises:
            TimeoutError: it took too long.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self.condition:
            while not condition():
                left = _NAP_S if until is None else until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"waited {timeout_s:g} s for {what}; {self.pulse.frames} frames are taken. "
                        "It goes on; wait again, or call shutdown()."
                    )
                self.check_lively()
                self.condition.wait(min(left, _NAP_S))

    def stop(self, timeout_s: float) -> bool:
        """End after the step under way; returns whether the thread has ended, or is the caller."""
        if self.left_behind:  # the pulse is that of the parent
            return super().stop(timeout_s)
        with self.condition:
            self._close_by = time.monotonic() + max(timeout_s / 2, timeout_s - 2.0)
            self.pulse.stop()
        return super().stop(timeout_s) or self.inside

    def doing(self) -> str:
        """What the thread is doing, for messages."""
        return self._doing
