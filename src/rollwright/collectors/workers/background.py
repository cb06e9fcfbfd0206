"""Runner: a thread that keeps the workers busy while the program does other things."""

from __future__ import annotations

from collections.abc import Callable

from rollwright._processes.threads import DaemonThread

__all__ = ["Runner"]


class Runner(DaemonThread):
    """Calls ``deliver`` again and again.

    Args:
        deliver: takes a function that tells whether to give up; returns whether there may be more.
    """

    def __init__(self, deliver: Callable[[Callable[[], bool]], bool]) -> None:
        super().__init__("rollwright-schedule")
        self._deliver = deliver

    def _work(self) -> None:
        while not self.stopping and self._deliver(lambda: self.stopping):
            pass
