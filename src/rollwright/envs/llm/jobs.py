"""Functions of the user's that run beside the collector: in threads, in an event loop or in processes, with limits."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollwright._processes.channel import ByValue, Channel, ChannelClosed
from rollwright._processes.child import Child
from rollwright._processes.connection import ExceptionInfo

_START_S = 120.0  # for a process to be ready
_END_S = 2.0  # for a process to end


@dataclass(slots=True)
class Finished:
    """The end of a job.

    Attributes:
        key: of the job.
        value: that its function returned.
        error: that it raised; ``TimeoutError`` where its limit was over.
        seconds: it ran.
    """

    key: Hashable
    value: Any
    error: BaseException | None
    seconds: float


@dataclass(slots=True, eq=False)
class Job:
    """A call in progress, or to come."""

    key: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    limit_s: float
    began: float = 0.0  # 0: it waits for a thread
    given_up: bool = False
    at_end: Callable[[], Any] | None = field(default=None, repr=False)


class Lane(ABC):
    """Where jobs run. ``Jobs`` starts them; each ends in its queue."""

    @abstractmethod
    def begin(self, job: Job, ended: queue.SimpleQueue[tuple[Job, Finished]]) -> None:
        """Run a job now, or when there is room for it."""

    @abstractmethod
    def give_up(self, job: Job) -> None:
        """The limit of a job is over: make room for others."""

    @abstractmethod
    def close(self) -> None:
        """End what runs jobs. May be called again."""


class Jobs:
    """Jobs in progress, and their ends. The limit of a job counts from its start, not while it waits for room.

    Used by one thread.

    Example:
        >>> jobs, lane = Jobs(), ThreadLane(2)
        >>> jobs.start("sum", lane, sum, ([1, 2],), limit_s=5.0)
        >>> [(end.key, end.value) for end in jobs.wait(5.0)]
        [('sum', 3)]
        >>> jobs.wait(None)
        []
        >>> lane.close()
    """

    def __init__(self) -> None:
        self._running: dict[Job, Lane] = {}
        self._ended: queue.SimpleQueue[tuple[Job, Finished]] = queue.SimpleQueue()

    def start(
        self, key: Hashable, lane: Lane, function: Callable[..., Any], arguments: tuple[Any, ...], *, limit_s: float
    ) -> None:
        """Run a function; its end has the key."""
        job = Job(key, function, arguments, limit_s)
        self._running[job] = lane
        lane.begin(job, self._ended)

    def forget(self, chosen: Callable[[Hashable], bool]) -> None:
        """Wait no longer for the jobs whose key is chosen."""
        for job in [job for job in self._running if chosen(job.key)]:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        self._running.pop(job).give_up(job)
        job.given_up = True

    def wait(self, timeout: float | None) -> list[Finished]:
        """The ends since the last call; waits until there is one, a limit is over, or the time.

        Returns:
            Empty where no job is in progress, or the time is over.
        """
        until = None if timeout is None else time.monotonic() + timeout
        ends: list[Finished] = []
        while self._running and not ends:
            ends = self._take(until)
            now = time.monotonic()
            for job in [job for job in self._running if job.began and now >= job.began + job.limit_s]:
                self._drop(job)
                over = TimeoutError(f"took longer than {job.limit_s:g} seconds")
                ends.append(Finished(job.key, None, over, now - job.began))
            if until is not None and now >= until:
                break
        return ends

    def _take(self, until: float | None) -> list[Finished]:
        # Jobs that wait for room have no limit yet: look again when the next one may be over, or has begun.
        limits = [job.began + job.limit_s if job.began else time.monotonic() + 0.05 for job in self._running]
        pause = min([*limits, *([] if until is None else [until])]) - time.monotonic()
        ends = []
        try:
            item = self._ended.get(timeout=pause) if pause > 0 else self._ended.get_nowait()
            while True:
                job, end = item
                if self._running.pop(job, None) is not None:
                    ends.append(end)
                item = self._ended.get_nowait()
        except queue.Empty:
            return ends

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def in_progress(self) -> list[Hashable]:
        """Keys of the jobs in progress, in the order in which they were started."""
        return [job.key for job in self._running]


def _outcome(job: Job) -> Finished:
    job.began = time.monotonic()
    value, error = None, None
    try:
        value = job.function(*job.arguments)
    except BaseException as raised:  # of the user's code, SystemExit too: it is raised where the end is taken
        error = raised
    return Finished(job.key, value, error, time.monotonic() - job.began)


class ThreadLane(Lane):
    """Runs jobs in daemon threads, each after the other where there is one thread.

    A function cannot be stopped: where its limit is over, its thread is left to it, and another takes its place.
    Coroutine functions run in an event loop of their own thread, all beside each other, and are cancelled at the limit.

    Args:
        most: threads at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Any]] = []
        self._threads = 0
        self._waiting: deque[Any] = deque()
        self._busy: dict[Job, queue.SimpleQueue[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self, job: Job, ended: queue.SimpleQueue[tuple[Job, Finished]]) -> None:
        """Run a job now, or when there is room for it."""
        if inspect.iscoroutinefunction(job.function) or inspect.iscoroutinefunction(
            getattr(job.function, "__call__", None)  # noqa: B004  (an object whose __call__ is async)
        ):
            asyncio.run_coroutine_threadsafe(self._await(job, ended), self._running_loop())
            return
        with self._lock:
            self._waiting.append((job, ended))
            self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and (self._idle or self._threads < self._most):
            job, ended = self._waiting.popleft()
            if self._idle:
                inbox = self._idle.pop()
            else:
                inbox = queue.SimpleQueue()
                self._threads += 1
                threading.Thread(target=self._serve, args=(inbox,), daemon=True, name="rollwright-jobs").start()
            self._busy[job] = inbox
            inbox.put((job, ended))

    def _serve(self, inbox: queue.SimpleQueue[Any]) -> None:
        while (item := inbox.get()) is not None:
            job, ended = item
            end = _outcome(job)
            with self._lock:
                if self._busy.pop(job, None) is None:  # given up: another thread has its place
                    return
                self._idle.append(inbox)
                self._hand_out()
            ended.put((job, end))

    def give_up(self, job: Job) -> None:
        """The limit of a job is over: make room for others."""
        if job.at_end is not None:
            job.at_end()
        with self._lock:
            self._waiting = deque(item for item in self._waiting if item[0] is not job)
            if self._busy.pop(job, None) is not None:
                self._threads -= 1
                self._hand_out()

    def close(self) -> None:
        """End what runs jobs. May be called again."""
        with self._lock:
            for inbox in self._idle:
                inbox.put(None)
            self._threads -= len(self._idle)
            self._idle.clear()
            self._waiting.clear()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:  # jobs may be begun by several threads
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(loop,), daemon=True, name="rollwright-async-jobs").start()
            return self._loop

    @staticmethod
    async def _await(job: Job, ended: queue.SimpleQueue[tuple[Job, Finished]]) -> None:
        if job.given_up:
            return
        began = job.began = time.monotonic()
        loop = asyncio.get_running_loop()
        task: asyncio.Task[Any] = loop.create_task(_coroutine(job))
        job.at_end = partial(loop.call_soon_threadsafe, task.cancel)
        value, error = None, None
        try:
            value = await task
        except BaseException as raised:
            error = raised
        ended.put((job, Finished(job.key, value, error, time.monotonic() - began)))


async def _coroutine(job: Job) -> Any:
    made: Coroutine[Any, Any, Any] = job.function(*job.arguments)
    return await made


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    finally:
        loop.close()


class ProcessLane(Lane):
    """Calls one function in processes, which are killed where a limit is over, and started again.

    Args:
        function: that is called there; pickled by value.
        most: processes at most.
        name: for messages.
    """

    def __init__(self, function: Callable[..., Any], most: int, name: str) -> None:
        self._function, self._name = function, name
        self._threads = ThreadLane(most)
        self._free: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self._children: set[Child] = set()
        self._closed = False
        self._lock = threading.Lock()

    def begin(self, job: Job, ended: queue.SimpleQueue[tuple[Job, Finished]]) -> None:
        """See :meth:`Lane.begin`; the limit of a job is kept here."""
        limit_s, arguments = job.limit_s, job.arguments
        job.function, job.arguments = self._call, (arguments, limit_s)
        job.limit_s = limit_s + _START_S + _END_S
        self._threads.begin(job, ended)

    def _call(self, arguments: tuple[Any, ...], limit_s: float) -> Any:
        try:
            child = self._free.get_nowait()
        except queue.Empty:
            child = self._start()
        try:
            child.channel.send(ByValue(arguments), limit_s)
            answer = child.channel.recv(limit_s)
        except TimeoutError:
            self._end(child)
            raise TimeoutError(f"took longer than {limit_s:g} seconds") from None
        except ChannelClosed:
            self._end(child)
            raise RuntimeError(f"its process {child.how_it_ended()}") from None
        if isinstance(answer, ExceptionInfo):
            self._end(child)
            raise answer.error(f"in a process of {self._name}")
        self._free.put(child)
        kind, value = answer
        if kind == "raised":
            raise value.error(f"in a process of {self._name}")
        return value

    def _start(self) -> Child:
        child = Child(_serve_function, self._function, name=self._name)
        with self._lock:
            if self._closed:
                child.kill()
            self._children.add(child)
        try:
            ready = child.channel.recv(_START_S, f"a process of {self._name} to start")
        except ChannelClosed:
            self._end(child)
            raise RuntimeError(f"its process {child.how_it_ended()} when it started") from None
        if isinstance(ready, ExceptionInfo):
            self._end(child)
            raise ready.error(f"in a process of {self._name}")
        return child

    def _end(self, child: Child) -> None:
        child.kill()
        child.wait(_END_S)
        child.close()
        with self._lock:
            self._children.discard(child)

    def give_up(self, job: Job) -> None:
        """See :meth:`Lane.give_up`; its process is killed at its limit."""
        self._threads.give_up(job)

    def close(self) -> None:
        """End what runs jobs. May be called again."""
        with self._lock:
            self._closed = True
            children = list(self._children)
        for child in children:
            self._end(child)
        self._threads.close()
        self._free = queue.SimpleQueue()
        self._closed = False


def _serve_function(channel: Channel, function: Callable[..., Any]) -> None:
    """In the process: call the function with what arrives."""
    try:
        channel.send("ready")
        while True:
            if not channel.poll(1.0):
                continue
            arguments = channel.recv(0.0).value
            try:
                value = function(*arguments)
            except Exception as error:
                channel.send(("raised", ExceptionInfo.of(error)))
            else:
                channel.send(("returned", value))
    except ChannelClosed:
        return
