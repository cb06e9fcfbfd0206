"""Background: ``start()``, ``pause()`` and ``shutdown()`` of a collector's background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from rollwright._warnings import warn_user
from rollwright.collectors.core import NothingLeft, never
from rollwright.collectors.delivery.base import RolloutDelivery
from rollwright.collectors.delivery.thread import WAIT_S, BufferFiller, CollectorThread, StepLock, paused_error
from rollwright.collectors.delivery_options import buffer_of
from rollwright.collectors.rollout.rollout import Rollout


class Background(BufferFiller):
    """Fills a replay buffer in a thread.

    Args:
        rollout: collects.
        delivery: writes.
        delivered: called after each batch.

    Attributes:
        step_lock: for threads that use the collector without that one.
    """

    thread: CollectorThread | None = None

    def __init__(self, rollout: Rollout, delivery: RolloutDelivery, delivered: Callable[[], Any] = never) -> None:
        options = rollout.options
        buffer = None if options.replay_buffer is None else buffer_of(options)
        super().__init__(buffer, rollout.owner, "a thread")
        self._rollout, self._delivery, self._delivered = rollout, delivery, delivered
        self.step_lock = StepLock(rollout)
        self._leave_limiter: Callable[[], None] | None = None  # takes this collector from those that the limiter asks
        self._interrupted = rollout.interrupted  # of the rollout without a thread
        self._mapper: int | None = None  # thread that is inside map_fn()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: there is no replay buffer, or the thread runs already.
            TypeError: the policy cannot be copied.
        """
        rollout = self._rollout
        self.check_start()
        if rollout.act_with_copy():
            warn_user(
                "start: the policy is a function around a module, or uses one that cannot be copied with it; the "
                "thread acts with weights that may change in the middle of a step. Pass an nn.Module or a "
                "TensorDictModule.",
                UserWarning,
            )
        self.thread = thread = CollectorThread(
            self._deliver_one,
            rollout.interrupted or never,
            applied=self._applied,
            ended=self._ended,
            version=rollout.acting.version,
            timer=rollout.timer,
            exploration_type=rollout.options.exploration_type,
        )
        self.step_lock.between_steps(lambda: self._come_by(thread))
        self._delivery.in_background = True
        self._join_limiter()
        self.begin(thread)

    def _come_by(self, thread: CollectorThread) -> None:
        self._interrupted, self._rollout.interrupted = self._rollout.interrupted, thread.checkpoint

    def _applied(self, version: int) -> None:
        self._rollout.acting.version = version

    def _ended(self) -> None:
        self._rollout.interrupted = self._interrupted
        self._delivery.in_background = False

    def _deliver_one(self) -> bool:
        delivery = self._delivery
        if not delivery.ready():
            delivery.ended()
            return False
        if delivery.has_room():
            with suppress(NothingLeft):
                delivery.next([])
                self._delivered()
        else:
            delivery.await_room(stop=self._is_to_look_again)
        return True  # what was asked of the thread while it waited may have changed what is to be delivered

    def _is_to_look_again(self) -> bool:
        return self.thread is None or not self.thread.goes_on() or self._rollout.completed

    def _join_limiter(self) -> None:
        """Let those who wait for samples know how the thread ends."""
        limiter = getattr(self._buffer, "insert_limiter", None)
        if limiter is not None:
            self._part_from_limiter()
            self._leave_limiter = limiter.add_inserter(self._inserts)

    def _part_from_limiter(self) -> None:
        if self._leave_limiter is not None:
            self._leave_limiter()
            self._leave_limiter = None

    def _inserts(self) -> str:
        self.raise_error()
        thread = self.thread
        if thread is None or not thread.running:
            return f"{self._rollout.owner} has ended, after {self._rollout.frames:,} frames"
        return f"the thread of {self._rollout.owner} is in {thread.doing()}"

    # While it runs ----------------------------------------------------------------------------

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the thread between two steps inside the ``with`` block."""
        thread = self.thread
        if thread is None:
            yield
            return
        thread.raise_error()
        with thread.resting(between_batches=False):
            yield

    def between_batches(self) -> AbstractContextManager[None]:
        """Let nobody collect inside the ``with`` block: no thread of :meth:`start`, and no other thread.

        Raises:
            TimeoutError: a step, or the batch of another thread, did not end in time.
        """
        thread = self.thread
        if thread is None:
            return self.step_lock.taken(WAIT_S)
        if not thread.inside:
            thread.raise_error()
            if self._mapper == threading.get_ident() and thread.rests_in_a_batch:
                raise paused_error("map_fn: the method")
            if not thread.running:
                return self.step_lock.taken(WAIT_S)
        return thread.resting(between_batches=True)

    @contextmanager
    def mapping(self) -> Iterator[None]:
        """Inside the ``with`` block, this thread is in ``map_fn``, which ends no batch in a pause."""
        before, self._mapper = self._mapper, threading.get_ident()
        try:
            yield
        finally:
            self._mapper = before

    # Weights ----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the newest weights that were published."""
        thread = self.thread
        return self._rollout.acting.version if thread is None or not thread.running else thread.version

    def version_loaded(self) -> None:
        """The version of the weights was loaded: count on from it."""
        if self.thread is not None:
            self.thread.version = self._rollout.acting.version

    def publish(self, updates: Mapping[str, Callable[[], None]]) -> int:
        """Let new weights act before the next step; returns their version."""
        thread = self.thread
        version = thread.publish(updates) if thread is not None and thread.running else None
        if version is not None:
            return version
        return self.step_lock.between_steps(lambda: self._apply(updates))

    def _apply(self, updates: Mapping[str, Callable[[], None]]) -> int:
        for apply in updates.values():
            apply()
        acting = self._rollout.acting
        acting.version += 1
        return acting.version

    def stats(self) -> dict[str, Any]:
        """What ``stats()`` of a collector reports on it."""
        if self.thread is None:
            return {}
        return {"background": self.thread.stats(), "policy_version_acting": self._rollout.acting.version}

    # The end ----------------------------------------------------------------------------------

    def end(
        self, timeout_s: float | None, close: Callable[[], None], *, raise_on_error: bool, closed_before: bool
    ) -> bool:
        """End the thread between two steps; what was collected is written.

        Args:
            timeout_s: how long to wait for that; None: 10 s.
            close: called in the thread if it takes longer.
            raise_on_error: raise what went wrong.
            closed_before: whether this is the second attempt, which raises no timeout.

        Returns:
            Whether it has ended.
        """
        thread = self.thread
        if thread is None:
            return True
        if thread.stop(timeout_s, at_end=close):
            self.thread = None
            self._part_from_limiter()
            if raise_on_error:
                thread.raise_error()
            return True
        if raise_on_error and not closed_before and not thread.inside:
            limit = "10 s" if timeout_s is None else f"{timeout_s:g} s"
            raise TimeoutError(
                f"shutdown: waited {limit} for {thread.doing()} to end. The thread is left behind, and writes what "
                "it has when the step ends. Look there for what it waits for."
            )
        return False
