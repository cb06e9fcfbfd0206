"""A thread that runs evaluations one at a time, and their state for other threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rollwright._processes.threads import DaemonThread
from rollwright.collectors.delivery.thread import exploration_of_this_thread
from rollwright.collectors.evaluation.backends import Backend
from rollwright.collectors.evaluation.episodes import EvaluationProgress, EvaluationRequest, Stopped
from rollwright.envs.utils import ExplorationType

_NAP_S = 0.5
_CLOSE_S = 5.0  # for an environment to be closed by default


class Evaluation:
    """A request, and what became of it.

    Attributes:
        request: what was asked for.
        awaited: whether the caller waits for it, and gets result or error from here.
        begun: whether the environments are seeded.
        done: whether it is over.
        result: of the evaluation, if it came to its end.
        error: what was raised, if anything was.
    """

    def __init__(self, request: EvaluationRequest, *, awaited: bool) -> None:
        self.request, self.awaited = request, awaited
        self.begun = self.done = False
        self.result: dict[str, Any] | None = None
        self.error: BaseException | None = None


class EvaluationQueue(DaemonThread):
    """Runs requested evaluations in a thread; its state is read and changed under its lock.

    Args:
        make_backend: makes what runs evaluations, in the thread.
        progress: of the current evaluation.
        on_result: called with each result, in the thread.
        exploration_type: that of the thread, whatever other threads set meanwhile.
        step_timeout_s: the longest silence in an evaluation.
    """

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        progress: EvaluationProgress,
        on_result: Callable[[dict[str, Any]], Any] | None,
        *,
        exploration_type: ExplorationType,
        step_timeout_s: float,
    ) -> None:
        super().__init__("rollwright-evaluator")
        self._make_backend, self.progress, self._on_result = make_backend, progress, on_result
        self._exploration = exploration_type
        self._step_timeout_s = step_timeout_s
        self.current: Evaluation | None = None
        self.next: Evaluation | None = None
        self.unread: dict[str, Any] | None = None
        self.evaluations = 0
        self.backend: Backend | None = None
        self._doing = "its environment and policy"
        self._close_by: float | None = None  # when its backend is made to end
        self.end = "ended"

    # The thread -------------------------------------------------------------------------------

    def open(self, timeout_s: float) -> None:
        """Begin; returns when the backend is made.

        Raises:
            TimeoutError: that took too long.
            Exception: what it raised.
        """
        self.progress.begin()
        self.start()
        self.wait_until(lambda: self.backend is not None or self.finished, "the Evaluator's start", timeout_s)
        self.raise_error()

    def _work(self) -> None:
        backend = None
        try:
            with exploration_of_this_thread(self._exploration):
                backend = self._make_backend()
                with self.condition:
                    self.backend = backend
                    self.condition.notify_all()
                while (evaluation := self._take()) is not None:
                    self._evaluate(backend, evaluation)
        finally:
            if backend is not None:
                self.end = backend.close(self._closing_time)

    def _closing_time(self) -> float:
        """When the backend is made to end, if it does not by itself; a later call of :meth:`stop` may change that."""
        if self._close_by is None:
            self._close_by = time.monotonic() + _CLOSE_S
        return self._close_by

    def _finish(self) -> None:
        self.current = self.next = None

    def _take(self) -> Evaluation | None:
        with self.condition:
            while not self.stopping:
                if self.next is not None:
                    self.current, self.next = self.next, None
                    self.progress.begin()
                    self._doing = "a step of its environment"
                    return self.current
                self.condition.wait(_NAP_S)
            return None

    def _evaluate(self, backend: Backend, evaluation: Evaluation) -> None:
        try:
            evaluation.result = backend.run(evaluation.request, lambda: self._begun(evaluation))
            self.evaluations += 1
            if self._on_result is not None:
                self._doing = "on_result"
                self.progress.beat()
                self._on_result(dict(evaluation.result))
        except Stopped:
            pass
        except Exception as error:
            evaluation.error = error
        with self.condition:
            if not evaluation.awaited:
                self.unread = evaluation.result if evaluation.result is not None else self.unread
                self._error = evaluation.error or self._error
            self.current, evaluation.done = None, True
            self.condition.notify_all()

    def _begun(self, evaluation: Evaluation) -> None:
        with self.condition:
            evaluation.begun = True
            self.condition.notify_all()

    # What others ask --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an evaluation runs, or is to."""
        return self.current is not None or self.next is not None

    def put(self, evaluation: Evaluation) -> bool:
        """Run an evaluation next; returns whether it replaced another one that waited."""
        with self.condition:
            lost, self.next = self.next, evaluation
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
        ended = None if self.backend is None or self.current is not None or self.stopping else self.backend.ended()
        if ended is not None:
            raise ended

    def check_lively(self) -> None:
        """Raise where an evaluation has been silent for too long.

        Raises:
            TimeoutError: it did not end in time; the message names what it does.
        """
        # A process is killed when it is silent, and its error comes a little later.
        limit = self._step_timeout_s + (0.0 if self.backend is None or self.backend.pid is None else 5.0)
        current = self.current  # the thread may be through with it meanwhile
        if current is not None and self.progress.silence_s > limit:
            raise TimeoutError(
                f"evaluation of step {current.request.step}: waited {self.progress.silence_s:.1f} s for {self._doing}, "
                f"after {self.progress.frames} frames. Look there for what blocks, or raise env_step_timeout."
            )

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float | None) -> None:
        """Wait, as long as the current evaluation makes progress.

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
                        f"waited {timeout_s:g} s for {what}; {self.progress.frames} frames are taken. "
                        "It goes on; wait again, or call shutdown()."
                    )
                self.check_lively()
                self.condition.wait(min(left, _NAP_S))

    def stop(self, timeout_s: float) -> bool:
        """End after the current step; returns whether the thread has ended, or is the caller."""
        if self.left_behind:  # the progress is that of the parent
            return super().stop(timeout_s)
        with self.condition:
            self._close_by = time.monotonic() + max(timeout_s / 2, timeout_s - 2.0)
            self.progress.stop()
        return super().stop(timeout_s) or self.inside

    def doing(self) -> str:
        """What the thread is doing, for messages."""
        return self._doing
