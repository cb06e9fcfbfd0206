"""Backends of evaluation: in the thread that asks for them, or in a process."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from rollwright._memory import Segment
from rollwright._processes.channel import Channel
from rollwright._processes.child import STOPPED_S, Child
from rollwright._processes.failures import ExceptionInfo
from rollwright._processes.health import Heartbeats
from rollwright._processes.pool import Answer, Pool
from rollwright.collectors.evaluation.episodes import (
    EpisodeRunner,
    EvaluationProgress,
    EvaluationRequest,
    Settings,
    Stopped,
)
from rollwright.errors import WorkerError

_NAP_S = 0.2
_NAME = "Evaluator's process"
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
        """See :meth:`EpisodeRunner.run`."""

    @abstractmethod
    def close(self, until: Callable[[], float]) -> str:
        """End by a time (``time.monotonic()``), which may change meanwhile; returns how, see :meth:`Child.end`."""

    def ended(self) -> WorkerError | None:
        """Why no evaluation can run any more; None: it can."""
        return None


class ThreadBackend(Backend):
    """In this thread, with torch's generators shared with the rest of the program."""

    def __init__(self, settings: Settings, progress: EvaluationProgress) -> None:
        self._runner = EpisodeRunner(settings, progress, lambda: False, own_generators=False)

    def run(self, request: EvaluationRequest, begun: Callable[[], None]) -> dict[str, Any]:
        """See :class:`Backend`."""
        return self._runner.run(request, begun)

    def close(self, until: Callable[[], float]) -> str:
        """See :class:`Backend`."""
        self._runner.close()
        return "ended"


class ProcessBackend(Backend):
    """In a process.

    Args:
        settings: what and how.
        progress: over ``memory``.
        memory: goes along.
        start: how.
        step_timeout_s: a process that is silent for longer is killed.

    Raises:
        WorkerError: environment, policy or ``init_fn`` raised; or the process ended.
        TimeoutError: it takes too long.
    """

    def __init__(
        self,
        settings: Settings,
        progress: EvaluationProgress,
        memory: Segment,
        start: ProcessStart,
        step_timeout_s: float,
    ) -> None:
        self._progress, self._step_timeout_s = progress, step_timeout_s
        self._child = Child(
            serve,
            settings,
            memory,
            start.init_fn,
            name="rollwright-evaluator",
            start_method=start.start_method,
            num_threads=start.num_threads,
        )
        self.pid = self._child.pid
        self._pool = Pool(1, lambda _, message: Answer(_TICKET, message), only_answers=True)
        self._pool.add(_PLACE, self._child)
        try:
            self._progress.begin()
            self._expect_answer()
            self._answer("its environment and policy", start.timeout_s)
        except BaseException:
            self._pool.drop(_PLACE, "could not start")
            raise

    def run(self, request: EvaluationRequest, begun: Callable[[], None]) -> dict[str, Any]:
        """See :class:`Backend`."""
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
        while call.due:
            if self._progress.stopped:
                raise Stopped
            if self._pool.run_once(_NAP_S):
                continue
            stopped = bool(self._pool.stopped(STOPPED_S))
            if stopped or heartbeats.is_silent(_PLACE, self._progress.beaten_at, silence_s):
                self._pool.drop(_PLACE, "was killed")
                raise TimeoutError(
                    f"{_NAME} (pid {self.pid}): waited {STOPPED_S if stopped else silence_s:g} s for {waiting_for}, "
                    f"after {self._progress.frames} frames of this evaluation, and killed it. Look there for what "
                    "blocks, or raise env_step_timeout."
                )
        answer = call.answers.get(_PLACE)
        if isinstance(answer, EvaluationFailed):
            raise answer.failure.error(_NAME)
        if call.losses:
            if self._progress.stopped:
                raise Stopped
            [(loss, _)] = call.losses.values()
            if loss.failure is not None:
                raise loss.failure.error(_NAME)
            raise WorkerError(
                f"{_NAME} (pid {self.pid}) {loss.how} in the middle of an evaluation, after {self._progress.frames} "
                "frames. Make a new Evaluator to go on."
            )
        return answer

    def ended(self) -> WorkerError | None:
        """See :class:`Backend`."""
        if self._child.alive:
            return None
        return WorkerError(f"{_NAME} (pid {self.pid}) {self._child.how_it_ended()}. Make a new Evaluator to go on.")

    def close(self, until: Callable[[], float]) -> str:
        """See :class:`Backend`."""
        ended = self._pool.end(until, hang_up=True)
        return ended[_PLACE].how if ended else "ended"


def serve(channel: Channel, settings: Settings, memory: Segment, init_fn: Callable[[], None] | None) -> None:
    """What the process runs."""
    if init_fn is not None:
        init_fn()
    progress = EvaluationProgress(memory)
    # While an evaluation runs, nothing is sent to this process: what can be read then is the end of the channel.
    runner = EpisodeRunner(settings, progress, channel.poll, own_generators=True)
    try:
        channel.send(None)
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
