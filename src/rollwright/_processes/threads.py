"""DaemonThread: a thread that hands its error to the next caller and ends before the interpreter does; Fillers."""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from rollwright._processes.forks import ExitStage, call_at_exit, not_here, on_fork

_EXIT_S = 1.0  # for all threads together, when the process ends
_LAST_STEP_S = 1.0  # for a thread that has finished to be gone


class DaemonThread(ABC):
    """Carries out :meth:`_work` in a thread, once.

    Args:
        name: of the thread.

    Attributes:
        condition: held by whoever reads or changes what the thread shares with others; notified of the end.
        stopping: whether the thread was asked to end.
        finished: whether it has ended.
        left_behind: whether it runs in the process that this one was forked from, and not here.

    Example:
        >>> class Counter(DaemonThread):
        ...     count = 0
        ...
        ...     def _work(self):
        ...         while not self.stopping:
        ...             self.count += 1
        ...         raise ValueError("asked too much")
        >>> counter = Counter("counter")
        >>> counter.start()
        >>> counter.stop(10.0), counter.count > 0, counter.error_text()
        (True, True, 'ValueError: asked too much')
        >>> counter.raise_error()
        Traceback (most recent call last):
        ...
        ValueError: asked too much
        >>> counter.raise_error()
    """

    def __init__(self, name: str) -> None:
        self.condition = threading.Condition()
        self.stopping = self.finished = self.left_behind = False
        self._home = os.getpid()
        self._error: BaseException | None = None
        self._num_torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        on_fork(self)

    def reset_after_fork(self) -> None:
        """In a forked child, to which no thread has come along but the one that forked."""
        self.condition = threading.Condition()
        if self._thread.ident is not None and not self.finished and not self.inside:
            self.finished = self.left_behind = True

    @abstractmethod
    def _work(self) -> None:
        """What the thread does; it looks at :attr:`stopping` now and then."""

    def _finish(self) -> None:  # noqa: B027  (most have nothing to do then)
        """Done in the thread at the end of its work, whatever became of that, under the lock."""

    def start(self) -> None:
        """Begin."""
        _started.add(self)
        call_at_exit(_end_all, ExitStage.THREADS)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self._num_torch_threads)  # a new thread takes as many as there are cores
        try:
            self._work()
        except BaseException as error:  # it is raised again, in the thread of the next caller
            self._error = error
        with self.condition:
            try:
                self._finish()
            finally:
                self.finished = True
                self.condition.notify_all()

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return not self.finished

    @property
    def inside(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def raise_error(self) -> None:
        """Raise what ended the thread, once; in a forked child that it was left behind, until :meth:`stop`."""
        if self.left_behind:
            raise not_here(f"the thread {self._thread.name!r}", self._home)
        with self.condition:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def error_text(self) -> str | None:
        """What ended the thread and was not raised yet, as text."""
        error = self._error
        return None if error is None else f"{type(error).__name__}: {error}"

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end; returns whether it has, within ``timeout_s``. The thread itself does not wait."""
        with self.condition:
            self.stopping = True
            self.condition.notify_all()
            if self.left_behind:
                self.left_behind, self._error = False, None
                return True
            if self._thread.ident is None or self.inside:  # it has not begun, or cannot wait for itself
                return self._thread.ident is None or self.finished
            ended = self.condition.wait_for(lambda: self.finished, timeout_s)
        if ended:
            self._thread.join(_LAST_STEP_S)
        return ended


class Fillers:
    """Those who fill a buffer in threads or processes that this process has started; they are held weakly.

    Example:
        >>> class Filler:
        ...     def raise_error(self):
        ...         raise OSError("the disk is full")
        >>> filler, fillers = Filler(), Fillers()
        >>> fillers.add(filler.raise_error)
        >>> fillers.raise_error()
        Traceback (most recent call last):
        ...
        OSError: the disk is full
    """

    def __init__(self) -> None:
        self._methods: tuple[weakref.WeakMethod[Callable[[], None]], ...] = ()
        self._process = os.getpid()

    def add(self, raise_error: Callable[[], None]) -> None:
        """Ask somebody from now on.

        Args:
            raise_error: a method: raises, once, what ended their work.
        """
        added = weakref.WeakMethod(raise_error)
        if self._process != os.getpid():
            self._methods, self._process = (), os.getpid()
        self._methods = (*(method for method in self._methods if method() is not None and method != added), added)

    def raise_error(self) -> None:
        """Raise what has ended anybody's work; nothing in a fork, where none of them is."""
        if self._process != os.getpid():
            return
        for method in self._methods:
            raise_error = method()
            if raise_error is not None:
                raise_error()


_started: weakref.WeakSet[DaemonThread] = weakref.WeakSet()


def _end_all() -> None:
    """End all threads before the process does: one that is stopped inside torch would crash it."""
    until = time.monotonic() + _EXIT_S
    running = [thread for thread in _started if thread._thread.is_alive()]  # none in a fork, whose locks nobody opens
    for thread in running:
        thread.stop(0.0)
    for thread in running:
        thread.stop(max(0.0, until - time.monotonic()))
