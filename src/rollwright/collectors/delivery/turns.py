"""Turns: several threads use one collector, one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rollwright.collectors.rollout.rollout import Rollout

WAIT_S = 60.0  # for a batch or a step of another thread to end, at most
_NAP_S = 0.02

T = TypeVar("T")


class _Job:
    """A call that another thread makes between two of its steps."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.done = call, threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call it, and keep what came of it."""
        try:
            self._value = self._call()
        except BaseException as error:  # it is raised where the call was asked for
            self._error = error
            if not isinstance(error, Exception):  # Ctrl-C is for the thread that runs here
                raise
        finally:
            self.done.set()

    def result(self) -> Any:
        """What it returned or raised."""
        if self._error is not None:
            raise self._error
        return self._value


class Turns:
    """Lets one thread at a time collect, reset or save, and change weights between two steps of whichever collects.

    Args:
        rollout: collects; it holds ``rollout.stepping`` from the first step of a batch to the last.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._turn = threading.RLock()
        self._jobs: list[_Job] = []
        self._asking = threading.Lock()
        self._interrupted: Callable[[], bool] | None = None  # of the rollout, while there are jobs

    @contextmanager
    def taken(self, limit_s: float | None = None) -> Iterator[None]:
        """Have the collector alone inside the ``with`` block; a thread that has it already may take it again.

        Args:
            limit_s: how long to wait for another thread's batch; None: until it ends.

        Raises:
            TimeoutError: it did not end in time.
        """
        if not self._turn.acquire(timeout=-1 if limit_s is None else limit_s):
            raise TimeoutError(
                f"waited {limit_s:g} s for the batch that another thread collects to end. Call it from that thread, "
                "between two batches."
            )
        try:
            yield
        finally:
            self._turn.release()

    def between_steps(self, call: Callable[[], T]) -> T:
        """Call a function while no step is taken: at once, or in the thread that collects, before its next step.

        Raises:
            TimeoutError: the step did not end in time; the function was not called.
        """
        stepping = self._rollout.stepping
        if stepping.acquire(blocking=False):
            try:
                self._do_jobs()
                return call()
            finally:
                stepping.release()
        job, limit = _Job(call), time.monotonic() + WAIT_S
        self._ask(job)
        try:
            while not job.done.wait(_NAP_S):
                if stepping.acquire(blocking=False):  # the batch has ended
                    try:
                        self._do_jobs()
                    finally:
                        stepping.release()
                elif time.monotonic() > limit and self._withdraw(job):
                    raise TimeoutError(f"waited {WAIT_S:g} s for a step of another thread to end. Nothing was changed.")
        except BaseException:
            self._withdraw(job)
            raise
        result: T = job.result()
        return result

    def _ask(self, job: _Job) -> None:
        with self._asking:
            if not self._jobs:
                self._interrupted, self._rollout.interrupted = self._rollout.interrupted, self._checkpoint
            self._jobs.append(job)

    def _withdraw(self, job: _Job) -> bool:
        """Let nobody call the function; returns whether nobody has begun to."""
        with self._asking:
            if job not in self._jobs:
                return False
            self._jobs.remove(job)
            if not self._jobs:
                self._rollout.interrupted = self._interrupted
            return True

    def _checkpoint(self) -> bool:
        """Between two steps, in the thread that collects: whether the batch ends here."""
        self._do_jobs()
        interrupted = self._rollout.interrupted
        return interrupted is not None and interrupted()

    def _do_jobs(self) -> None:
        while True:  # one by one: Ctrl-C in one of them leaves the others waiting, and does not lose them
            with self._asking:
                if not self._jobs:
                    return
                job = self._jobs.pop(0)
                if not self._jobs:
                    self._rollout.interrupted = self._interrupted
            job.run()
