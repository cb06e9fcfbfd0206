"""Ctrl-C during a collection: the first ends it between two steps, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class SignalInterrupts:
    """Catches SIGINT and SIGTERM inside its ``with`` block; the collector's interruptor.

    The first signal makes :meth:`collection_stopped` true, which a collector asks after every step. A
    further one raises ``KeyboardInterrupt``, once, for a step that does not return; inside of
    :meth:`saving` it only makes :attr:`hurried` true. So no signal reaches code that writes to disk.

    Attributes:
        signum: the first signal received, or None.
        hurried: whether another one came after it.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.hurried = False
        self._may_raise = True
        self._previous: dict[int, Any] = {}

    def collection_stopped(self) -> bool:
        """Whether a signal was received."""
        return self.signum is not None

    @property
    def exit_status(self) -> int:
        """What shells report for a program that ended by the signal; 0 without one."""
        return 0 if self.signum is None else 128 + self.signum

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let no signal raise inside the block."""
        before, self._may_raise = self._may_raise, False
        try:
            yield
        finally:
            self._may_raise = before

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            return
        self.hurried = True
        if self._may_raise:
            self._may_raise = False
            raise KeyboardInterrupt
