"""The thread in which engines wait for what generates by itself."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class LoopThread:
    """An event loop of asyncio in a thread; it ends with the process.

    Args:
        loop: one that runs in another thread already; None: a new one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = asyncio.new_event_loop() if loop is None else loop
        if loop is None:
            threading.Thread(target=self.loop.run_forever, name="rollwright-engines", daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Run a coroutine, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, _Result], limit_s: float, what: str) -> _Result:
        """Run a coroutine, and wait for its result.

        Args:
            coroutine: to run.
            limit_s: seconds to wait at most.
            what: it does, for the message: "engine: waited 5 s to ...".

        Raises:
            TimeoutError: the time is over; the coroutine is cancelled.
        """
        future = self.start(coroutine)
        try:
            return future.result(limit_s)
        except FutureTimeout:
            if future.done():  # it was the coroutine's own
                raise
            future.cancel()
            raise TimeoutError(f"engine: waited {limit_s:g} s to {what}.") from None


_shared: tuple[int, LoopThread] | None = None
_lock = threading.Lock()


def shared_loop() -> LoopThread:
    """The loop of all engines of this process."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] != os.getpid():  # a forked process has none of its parent's threads
            _shared = os.getpid(), LoopThread()
        return _shared[1]
