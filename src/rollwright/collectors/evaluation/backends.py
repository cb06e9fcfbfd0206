"""Where evaluations run: a queue of them in a thread, and backends in this process or another."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from rollwright._memory import Segment
from rollwright._processes.channel import Channel
from rollwright._processes.child import STOPPED_S, Child
from rollwright._processes.connection import Connection, ExceptionInfo, Heartbeats
from rollwright._processes.pool import Answer, Pool
from rollwright._processes.threads import DaemonThread
from rollwright.collectors.delivery.thread import exploration_of_this_thread
from rollwright.collectors.evaluation.episodes import (
    EpisodeRunner,
    EvaluationProgress,
    EvaluationRequest,
    Settings,
    Stopped,
    frozen_env,
)
from rollwright.collectors.rollout.environment import inner_conversations
from rollwright.envs.base import EnvBase
from rollwright.envs.utils import ExplorationType
from rollwright.errors import WorkerError

_LOOK_S = 0.5
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
                self.condition.wait(_LOOK_S)
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
                left = _LOOK_S if until is None else until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"waited {timeout_s:g} s for {what}; {self.progress.frames} frames are taken. "
                        "It goes on; wait again, or call shutdown()."
                    )
                self.check_lively()
                self.condition.wait(min(left, _LOOK_S))

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


_NAP_S = 0.2
_PLACE, _TICKET = 0, 0  # there is one process, and it is asked one thing at a time


class EvaluationFailed(NamedTuple):
    """An evaluation raised, and the process goes on."""

    failure: ExceptionInfo


class ProcessStart(NamedTuple):
    """Settings with which a process starts.

    Attributes:
        init_fn: called first, in the process.
        start_method: see :class:`Child`.
        num_threads: of torch.
        timeout_s: until environment and policy are made.
    """

    init_fn: Callable[[], None] | None
    start_method: str | None
    num_threads: int
    timeout_s: float


class Backend(ABC):
    """Runs evaluations."""

    pid: int | None = None

    @abstractmethod
    def run(self, request: EvaluationRequest, begun: Callable[[], None]) -> dict[str, Any]:
        """Evaluate as :meth:`EpisodeRunner.run` does; ``begun`` is called once the request is on its way."""

    @abstractmethod
    def close(self, until: Callable[[], float]) -> str:
        """End by a time (``time.monotonic()``), which may change meanwhile; returns how, see :meth:`Child.end`."""

    def ended(self) -> WorkerError | None:
        """Why no evaluation can run any more; None: it can."""
        return None


def episode_runner(
    settings: Settings, progress: EvaluationProgress, gone: Callable[[], bool], *, own_generators: bool
) -> EpisodeRunner:
    """What runs the evaluations of an environment; see :class:`EpisodeRunner` for arguments and errors."""
    with frozen_env(settings) as env:
        kind = EpisodeRunner
        if isinstance(env, EnvBase) and inner_conversations(env) is not None:
            from rollwright.collectors.evaluation.conversations import ConversationRunner

            kind = ConversationRunner
        return kind(env, settings, progress, gone, own_generators=own_generators)


class ThreadBackend(Backend):
    """In this thread, with torch's generators shared with the rest of the program."""

    def __init__(self, settings: Settings, progress: EvaluationProgress) -> None:
        self._runner = episode_runner(settings, progress, lambda: False, own_generators=False)

    def run(self, request: EvaluationRequest, begun: Callable[[], None]) -> dict[str, Any]:
        """Evaluate in the calling thread."""
        return self._runner.run(request, begun)

    def close(self, until: Callable[[], float]) -> str:
        """Close the environment; no time is needed for that."""
        self._runner.close()
        return "ended"


class ProcessBackend(Backend):
    """In another process, which runs :func:`serve`.

    Args:
        connection: to it.
        name: of the process, for messages.
        progress: that it shows.
        start_timeout_s: until environment and policy are made.
        step_timeout_s: a process that is silent for longer is killed.

    Raises:
        WorkerError: environment, policy or ``init_fn`` raised; or the process ended.
        TimeoutError: it takes too long.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        progress: EvaluationProgress,
        *,
        start_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self._connection, self._name, self.pid = connection, name, connection.pid
        self._progress, self._step_timeout_s = progress, step_timeout_s
        self._pool = Pool(1, lambda _, message: Answer(_TICKET, message), only_answers=True)
        self._pool.add(_PLACE, connection)
        try:
            self._progress.begin()
            self._expect_answer()
            self.pid = self._answer("its environment and policy", start_timeout_s)
        except BaseException:
            self._pool.drop(_PLACE, "could not start")
            raise

    def run(self, request: EvaluationRequest, begun: Callable[[], None]) -> dict[str, Any]:
        """Have the process evaluate, and wait for its answer."""
        self._expect_answer()
        self._pool.send(_PLACE, request)
        begun()
        answer: dict[str, Any] = self._answer("a step of its environment", self._step_timeout_s)
        return answer

    def _expect_answer(self) -> None:
        self._pool.calls.open(_TICKET)
        self._pool.calls.ask(_TICKET, _PLACE)

    def _answer(self, waiting_for: str, silence_s: float) -> Any:
        """What the process answers; it is killed if it gives no sign of life."""
        call, heartbeats = self._pool.calls[_TICKET], Heartbeats()
        who = f"{self._name} (pid {self.pid})"
        while call.due:
            if self._progress.stopped:
                raise Stopped
            if self._pool.run_once(_NAP_S):
                continue
            stopped = bool(self._pool.stopped(STOPPED_S))
            if stopped or heartbeats.is_silent(_PLACE, self._progress.beaten_at, silence_s):
                self._pool.drop(_PLACE, "was killed")
                raise TimeoutError(
                    f"{who}: waited {STOPPED_S if stopped else silence_s:g} s for {waiting_for}, "
                    f"after {self._progress.frames} frames of this evaluation, and killed it. Look there for what "
                    "blocks, or raise env_step_timeout."
                )
        answer = call.answers.get(_PLACE)
        if isinstance(answer, EvaluationFailed):
            raise answer.failure.error(self._name)
        if call.losses:
            if self._progress.stopped:
                raise Stopped
            [(loss, _)] = call.losses.values()
            if loss.failure is not None:
                raise loss.failure.error(self._name)
            raise WorkerError(
                f"{who} {loss.how} in the middle of an evaluation, after {self._progress.frames} "
                "frames. Make a new Evaluator to go on."
            )
        return answer

    def ended(self) -> WorkerError | None:
        """Why the process has ended; None: it lives."""
        if not self._connection.wait(0.0):
            return None
        how = self._connection.how_it_ended()
        return WorkerError(f"{self._name} (pid {self.pid}) {how}. Make a new Evaluator to go on.")

    def close(self, until: Callable[[], float]) -> str:
        """Hang up, and make the process end that does not by then."""
        ended = self._pool.end(until, hang_up=True)
        return ended[_PLACE].how if ended else "ended"


def process_backend(
    settings: Settings, progress: EvaluationProgress, memory: Segment, start: ProcessStart, step_timeout_s: float
) -> Backend:
    """Start a process of this machine, whose progress lies in ``memory``.

    Raises:
        WorkerError: environment, policy or ``init_fn`` raised; or the process ended.
        TimeoutError: it takes too long.
    """
    child = Child(
        _serve_child,
        settings,
        memory,
        start.init_fn,
        name="rollwright-evaluator",
        start_method=start.start_method,
        num_threads=start.num_threads,
    )
    return ProcessBackend(
        child, "Evaluator's process", progress, start_timeout_s=start.timeout_s, step_timeout_s=step_timeout_s
    )


def _serve_child(channel: Channel, settings: Settings, memory: Segment, init_fn: Callable[[], None] | None) -> None:
    serve(channel, settings, EvaluationProgress(memory), init_fn)


def serve(channel: Any, settings: Settings, progress: EvaluationProgress, init_fn: Callable[[], None] | None) -> None:
    """What the process runs, until its channel is closed.

    Args:
        channel: a :class:`Channel`, or what has its ``poll``, ``recv`` and ``send``.
        settings: what is evaluated, and how.
        progress: is shown there.
        init_fn: called first.
    """
    if init_fn is not None:
        init_fn()
    # While an evaluation runs, nothing is sent to this process: what can be read then is the end of the channel.
    runner = episode_runner(settings, progress, channel.poll, own_generators=True)
    try:
        channel.send(os.getpid())
        while True:
            while not channel.poll(1.0):
                pass
            request = channel.recv(1.0)
            progress.begin()
            try:
                answer: Any = runner.run(request, lambda: None)
            except Stopped:
                return
            except Exception as error:
                answer = EvaluationFailed(ExceptionInfo.of(error))
            channel.send(answer)
    finally:
        with contextlib.suppress(Exception):  # the process ends anyway, and an earlier error is the cause
            runner.close()
