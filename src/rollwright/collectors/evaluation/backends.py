"""Where evaluations run: in the thread that asks for them, or in a process."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from rollwright._memory import Segment
from rollwright._processes.channel import Channel, ChannelClosed
from rollwright._processes.child import STOPPED_S, Child
from rollwright._processes.failures import Failure
from rollwright.collectors.evaluation.episodes import EpisodeRunner, Progress, Request, Settings, Stopped
from rollwright.errors import WorkerError

__all__ = ["ThreadBackend", "ProcessStart", "Backend", "ProcessBackend"]

_SLICE_S = 0.2
_NAME = "Evaluator's process"


class ProcessStart(NamedTuple):
    """How a process starts.

    Attributes:
        init_fn: called first, there.
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
    def run(self, request: Request, begun: Callable[[], None]) -> dict[str, Any]:
        """See :meth:`EpisodeRunner.run`."""

    @abstractmethod
    def close(self, until: Callable[[], float]) -> str:
        """End by a time (``time.monotonic()``), which may change meanwhile; says how, see :meth:`Child.end`."""

    def ended(self) -> WorkerError | None:
        """Why no evaluation can run any more; None: it can."""
        return None


class ThreadBackend(Backend):
    """In this thread, with torch's generators shared with the rest of the program."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._runner = EpisodeRunner(settings, progress, _never, own_generators=False)

    def run(self, request: Request, begun: Callable[[], None]) -> dict[str, Any]:
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
        self, settings: Settings, progress: Progress, memory: Segment, start: ProcessStart, step_timeout_s: float
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
        try:
            self._progress.begin()
            self._answer("its environment and policy", start.timeout_s)
        except BaseException:
            self._child.kill()
            self._child.end(1.0)
            raise

    def run(self, request: Request, begun: Callable[[], None]) -> dict[str, Any]:
        """See :class:`Backend`."""
        try:
            self._child.channel.send(request, timeout_s=self._step_timeout_s)
        except ChannelClosed:
            raise self._gone() from None
        begun()
        answer: dict[str, Any] = self._answer("a step of its environment", self._step_timeout_s)
        return answer

    def _answer(self, waiting_for: str, silence_s: float) -> Any:
        """What the process sends next; it is alive, or gets killed."""
        channel, child = self._child.channel, self._child
        while not channel.poll():
            if self._progress.stopped:
                raise Stopped
            stopped = child.stopped_s() > STOPPED_S
            if stopped or self._progress.silence_s > silence_s:
                limit_s = STOPPED_S if stopped else silence_s
                child.kill()
                child.wait(_SLICE_S)
                raise TimeoutError(
                    f"{_NAME} (pid {self.pid}): waited {limit_s:g} s for {waiting_for}, after "
                    f"{self._progress.frames} frames of this evaluation, and killed it. Look there for what blocks, or "
                    "raise env_step_timeout."
                )
            wait([channel.fileno(), child.sentinel], _SLICE_S)
            if not child.alive and not channel.poll():
                raise self._gone()
        try:
            answer = channel.recv(silence_s, waiting_for)
        except ChannelClosed:
            if self._progress.stopped:
                raise Stopped from None
            raise self._gone() from None
        if isinstance(answer, Failure):
            raise answer.error(_NAME)
        return answer

    def _gone(self) -> WorkerError:
        self._child.wait(1.0)  # its channel closes before it ends
        return WorkerError(
            f"{_NAME} (pid {self.pid}) {self._child.how_it_ended()} in the middle of an evaluation, after "
            f"{self._progress.frames} frames. Make a new Evaluator to go on."
        )

    def ended(self) -> WorkerError | None:
        """See :class:`Backend`."""
        if self._child.alive:
            return None
        return WorkerError(f"{_NAME} (pid {self.pid}) {self._child.how_it_ended()}. Make a new Evaluator to go on.")

    def close(self, until: Callable[[], float]) -> str:
        """See :class:`Backend`."""
        self._child.channel.close()
        while (left_s := until() - time.monotonic()) > 0 and not self._child.wait(min(left_s, _SLICE_S)):
            pass
        return self._child.end(0.0)


def serve(channel: Channel, settings: Settings, memory: Segment, init_fn: Callable[[], None] | None) -> None:
    """What the process runs."""
    if init_fn is not None:
        init_fn()
    progress = Progress(memory)
    # While an evaluation runs, nothing is sent here: what can be read then is the end of the line.
    runner = EpisodeRunner(settings, progress, channel.poll, own_generators=True)
    try:
        channel.send(None)
        while True:
            while not channel.poll(1.0):
                pass
            request = channel.recv(1.0)
            progress.begin()
            try:
                answer: Any = runner.run(request, _nothing)
            except Stopped:
                return
            except Exception as error:
                answer = Failure.of(error)
            channel.send(answer)
    finally:
        with contextlib.suppress(Exception):  # the process ends anyway, and an earlier error tells more
            runner.close()


def _never() -> bool:
    return False


def _nothing() -> None:
    pass
