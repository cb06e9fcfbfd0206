"""Runner: a thread that keeps the workers busy while the program does other things."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

__all__ = ["Runner"]


class Runner:
    """Calls ``deliver`` again and again.

    Args:
        deliver: takes a function that tells whether to give up; returns whether there may be more.
    """

    def __init__(self, deliver: Callable[[Callable[[], bool]], bool]) -> None:
        self._deliver = deliver
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollwright-schedule", daemon=True)

    def start(self) -> None:
        """Begin."""
        _at_exit.add(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping and self._deliver(lambda: self._stopping):
                pass
        except BaseException as error:  # it is raised again, in the thread of the next caller
            self._error = error

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def inside(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def raise_error(self) -> None:
        """Raise what ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def told(self) -> str | None:
        """What ended the thread, as text."""
        return None if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def stop(self, timeout_s: float) -> bool:
        """End the thread; whether it has ended in time."""
        self._stopping = True
        if not self.inside and self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


_at_exit: weakref.WeakSet[Runner] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for runner in list(_at_exit):
        runner.stop(1.0)
