"""Defers Ctrl-C until a block of statements is complete."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Uninterrupted", "uninterrupted"]

_main = threading.main_thread()
_SIGINT = int(signal.SIGINT)
_plain: Any = importlib.import_module("_signal")  # without enums, which cost ten times the call


class Uninterrupted:
    """Holds off SIGINT inside a ``with`` block, and handles it when the outermost one ends.

    Python raises KeyboardInterrupt between any two operations of the main thread. Where a lock is held or a row is
    reserved, that would leave them so for ever. Other threads are not interrupted, and for them this does nothing; nor
    does it where SIGINT is ignored or ends the program without Python.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not _main:
            return
        if not self._depth:
            handler = _plain.getsignal(_SIGINT)
            if not callable(handler):
                return
            self._handler, self._held = handler, None
            _plain.signal(_SIGINT, self._hold)
        self._depth += 1

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = (number, frame)

    def __exit__(self, *error: object) -> None:
        if not self._depth or threading.current_thread() is not _main:
            return
        self._depth -= 1
        if not self._depth:
            _plain.signal(_SIGINT, self._handler)
            if self._held is not None:
                self.deliver()

    def deliver(self) -> None:
        """Handle what was held off, where stopping is safe: between two tries of a wait."""
        if self._held is not None and threading.current_thread() is _main:
            held, self._held = self._held, None
            self._handler(*held)

    def reset_after_fork(self) -> None:
        """In a forked child, whose main thread is the one that forked."""
        global _main
        before, _main = _main, threading.main_thread()
        self._held = None  # that signal was for the parent
        if self._depth and before is not _main:  # the thread that would end the block is not there
            self._depth = 0
            _plain.signal(_SIGINT, self._handler)


uninterrupted = Uninterrupted()
"""The one of this process: there is but one handler of SIGINT."""

os.register_at_fork(after_in_child=uninterrupted.reset_after_fork)
