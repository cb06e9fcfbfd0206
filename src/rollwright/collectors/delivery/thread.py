"""Threads of one collector: that of start(), which serves requests between two steps, and the lock that all take."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, Literal, TypeVar

from rollwright._processes.threads import DaemonThread
from rollwright._warnings import warn_user
from rollwright.collectors.core import NothingLeft, never
from rollwright.collectors.delivery.base import RolloutDelivery
from rollwright.collectors.options import add_filler, buffer_of
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.collectors.rollout.stats import StageTimer
from rollwright.envs.utils import ExplorationType, set_exploration_type

WAIT_S = 60.0  # for a batch or a step of another thread to end, at most
_LOOK_S = 0.02

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


class StepLock:
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
            while not job.done.wait(_LOOK_S):
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


_log = logging.getLogger("rollwright")
_STOP_S = 10.0  # for the thread to end, by default
_NAP_S = 1.0

_Apply = Callable[[], None]
_Place = Literal["step", "batch"]  # what the thread rests between


class CollectorThread(DaemonThread):
    """Runs ``deliver`` again and again in a thread.

    The thread comes by :meth:`checkpoint` once a step, between two steps. There it applies new weights, rests as long
    as somebody asks it to, or cuts the batch short. What it has to do there is looked at under a lock; where
    there is nothing, it costs reading one attribute.

    Args:
        deliver: collects and writes one batch; returns whether there may be more.
        interrupted: of the collector: whether the rollout ends after this step.
        apply: brings new weights into force, which have a version.
        ended: called in the thread when it ends.
        version: of the weights in force.
        timer: of the rollout.
        exploration_type: that of the thread, whatever other threads set meanwhile.
    """

    def __init__(
        self,
        deliver: Callable[[], bool],
        interrupted: Callable[[], bool],
        *,
        apply: Callable[[Sequence[_Apply], int], None],
        ended: Callable[[], None],
        version: int,
        timer: StageTimer,
        exploration_type: ExplorationType,
    ) -> None:
        super().__init__("rollwright-collector")
        self._deliver, self._interrupted = deliver, interrupted
        self._apply, self._ended = apply, ended
        self._exploration = exploration_type
        self.version = version  # the newest that was published
        self._updates: dict[str, _Apply] = {}
        self._new_version = False
        self._calm = True  # nothing is asked of the thread
        self._pauses = self._holds = 0  # who wants it to rest between two steps, and between two batches
        self._resting: _Place | None = None  # while it rests
        self._timer = timer
        self._at_end: _Apply | None = None

    # The thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        with exploration_of_this_thread(self._exploration):
            while self.goes_on() and self._deliver():
                pass

    def _finish(self) -> None:
        log_end(self)
        self._ended()
        self._apply_updates()

    def _run(self) -> None:
        super()._run()
        if self._at_end is not None:  # nobody waits any more
            self._at_end()

    def checkpoint(self) -> bool:
        """Between two steps: whether the batch ends here."""
        if not self._calm and self._attend("step"):
            return True
        return self._interrupted()

    def goes_on(self) -> bool:
        """Between two batches, in the thread: do what is asked; returns whether the thread goes on."""
        return self._calm or not self._attend("batch")

    def _attend(self, place: _Place) -> bool:
        """Do what is asked; returns whether the batch (or, between two of them, the thread) ends."""
        with self.condition:
            while True:
                self._apply_updates()
                if self.stopping or (self._holds and place == "step"):
                    self._resting = None
                    return True
                if not self._pauses and not self._holds:
                    self._resting, self._calm = None, True
                    return False
                self._resting = place
                self.condition.notify_all()
                begun = time.perf_counter()
                self.condition.wait(_NAP_S)
                self._timer.rested += (time.perf_counter() - begun) * (place == "step")

    def _apply_updates(self) -> None:
        updates, self._updates = self._updates, {}
        if self._new_version:
            self._new_version = False
            self._apply(list(updates.values()), self.version)

    # What others ask --------------------------------------------------------------------------------

    def publish(self, updates: Mapping[str, _Apply]) -> int | None:
        """Let new weights come into force before the next step, all at once.

        Returns:
            Their version; None if the thread has ended: nothing was done.
        """
        with self.condition:
            if self.finished:
                return None
            self._updates.update(updates)  # of two updates of one model, the last counts
            self.version += 1
            self._new_version, self._calm = True, False
            self.condition.notify_all()
            return self.version

    def resting(self, *, between_batches: bool) -> AbstractContextManager[None]:
        """Keep the thread at rest inside the ``with`` block; no effect in the thread itself, or after its end.

        Args:
            between_batches: rest there; the current batch is cut short, and written. Otherwise between two steps.

        Raises:
            TimeoutError: the current step did not end in time.
        """
        return nullcontext() if self.inside else self._rest(between_batches)

    @contextmanager
    def _rest(self, between_batches: bool) -> Iterator[None]:
        name, places = ("_holds", ("batch",)) if between_batches else ("_pauses", ("step", "batch"))
        with self.condition:
            setattr(self, name, getattr(self, name) + 1)
            self._calm = False
            self.condition.notify_all()
        try:
            with self.condition:
                rests = self.condition.wait_for(lambda: self.finished or self._resting in places, WAIT_S)
            if not rests:
                raise TimeoutError(f"pause: waited {WAIT_S:g} s for {self.doing()} to end. The collector goes on.")
            self.raise_error()
            yield
        finally:
            with self.condition:
                setattr(self, name, getattr(self, name) - 1)
                self.condition.notify_all()

    @property
    def rests_in_a_batch(self) -> bool:
        """Whether the thread rests between two steps."""
        return self._resting == "step"

    def stop(self, timeout_s: float | None, at_end: _Apply | None = None) -> bool:
        """End the thread between two steps; what was collected is written.

        Args:
            timeout_s: how long to wait for that.
            at_end: to be called in the thread if it takes longer.

        Returns:
            Whether it has ended.
        """
        with self.condition:
            self.stopping, self._calm = True, False
        ended = super().stop(_STOP_S if timeout_s is None else timeout_s)
        if not ended:
            with self.condition:
                ended = self.finished
                self._at_end = None if ended else at_end
        return ended

    def doing(self) -> str:
        """What the thread is doing, for a message."""
        if self.finished:
            return "nothing any more"
        if self._resting is not None:
            return f"a rest between two {'steps' if self._resting == 'step' else 'batches'}"
        frame = sys._current_frames().get(self._thread.ident or 0)
        where, what = "", "a batch"
        innermost = frame
        while frame is not None:
            what = _stage(frame) or what
            if what != "a batch":
                break
            frame = frame.f_back
        if innermost is not None:
            code = innermost.f_code
            where = f" (in {code.co_qualname}, {code.co_filename}:{innermost.f_lineno})"
        return what + where

    def stats(self) -> dict[str, Any]:
        """What ``stats()`` of a collector reports on it."""
        return {"running": self.running, "paused": self._resting is not None, "error": self.error_text()}


_STAGES = {"act": "a call of the policy", "step": "a step of the environment", "record": "a write of a frame"}


def _stage(frame: FrameType) -> str | None:
    """What a frame of the stack stands for."""
    code = frame.f_code
    of_a_path = code.co_qualname.split(".")[0] in ("GroupedPath", "ArrayPath", "PlainPath")
    return _STAGES.get(code.co_name) if of_a_path else None


def log_end(thread: DaemonThread) -> None:
    """Log what has ended the work of a thread: who looks at neither the collector nor its buffer may see it there."""
    if (error := thread.error_text()) is not None:
        _log.error(
            "collection in the background ended. The next call of the collector, or of its buffer, raises %s", error
        )


class BufferFiller:
    """Fills a replay buffer in a thread: what is the same whether one rollout collects, or workers do.

    Args:
        buffer: that is written; None: there is none.
        owner: name of the collector's class.
        who: what collects, for messages.

    Attributes:
        thread: the last one that was started and has not been ended.
    """

    thread: DaemonThread | None = None
    _takes_all = False  # whether somebody else takes what is collected
    _dropped = False

    def __init__(self, buffer: Any, owner: str, who: str) -> None:
        self._buffer, self._owner, self._who = buffer, owner, who

    @property
    def running(self) -> bool:
        """Whether a thread collects."""
        return self.thread is not None and self.thread.running

    def check_start(self) -> None:
        """Test that a thread can be started.

        Raises:
            RuntimeError: there is no replay buffer, or one runs already.
        """
        self.raise_error()
        if self._buffer is None and not self._takes_all:
            raise RuntimeError(
                f"start: this collector has no replay buffer, and nobody would get what {self._who} would collect. "
                "Pass replay_buffer= to it, or iterate over it."
            )
        if self.running:
            raise RuntimeError("start: this collector runs already. Call async_shutdown() to end it.")

    def begin(self, thread: DaemonThread) -> None:
        """Start a thread, of whose errors the buffer learns, too."""
        self.thread = thread
        add_filler(self._buffer, self._raise_to_watchers)
        thread.start()

    def raise_error(self) -> None:
        """Raise, once, what went wrong in the thread."""
        if self.thread is not None and not self.thread.inside:
            self.thread.raise_error()

    def _raise_to_watchers(self) -> None:
        """For who only looks at the buffer."""
        if not self._dropped and self.thread is not None and self.thread.error_text() is not None:
            self.raise_error()

    def check_idle(self, what: str) -> None:
        """Raise where a thread collects, and this is not it."""
        self.raise_error()
        if self.thread is not None and self.running and not self.thread.inside:
            raise RuntimeError(
                f"{what}: {self._who} of this collector fills its replay buffer, since start(). Sample from that; call "
                "async_shutdown() to end it."
            )


def paused_error(what: str) -> RuntimeError:
    """Why something cannot be done inside a pause."""
    return RuntimeError(
        f"{what} has to wait for the end of a rollout, and pause() keeps that from ending. Call it after the pause."
    )


def exploration_of_this_thread(exploration: ExplorationType) -> AbstractContextManager[Any]:
    """The exploration type of one thread, where tensordict knows that (from 0.15 on)."""
    if "thread_local" in inspect.signature(set_exploration_type.__init__).parameters:
        return set_exploration_type(exploration, thread_local=True)
    return nullcontext()


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
            apply=self._rollout.acting.take,
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
        acting = self._rollout.acting
        acting.take(list(updates.values()), acting.version + 1)
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
