"""QueueWriter: puts turns into a queue, one at a time, where other collectors write into a replay buffer."""

from __future__ import annotations

import inspect
import queue
import time
from collections.abc import Callable
from typing import Any, NoReturn

from tensordict import TensorDictBase

from rollwright.errors import RollwrightError

__all__ = ["QueueClosed", "QueueWriter"]

_LOOK_S = 0.1  # how often a wait for room looks whether it is to end
_LIMIT_S = 600.0  # for room, at most


class QueueClosed(RollwrightError):
    """The collector was shut down while a queue was full; what was not put is not counted as delivered."""


class QueueWriter:
    """Has the methods of a replay buffer that a delivery calls, and puts each row into a queue.

    A full queue is waited for; nothing is discarded.

    Args:
        queue: any object with ``put(item)``; with ``put(item, timeout=...)``, a wait for room has a limit, and
            ``stats()["waiting_for"]`` of the collector reports it.
        limit_s: seconds to wait for room at most.

    Attributes:
        write_count: items put so far.
        waiting_for: what a row waits for, while it does.
        closed: whether waiting ends.

    Raises:
        TypeError: there is no ``put``.
    """

    def __init__(self, queue: Any, limit_s: float = _LIMIT_S) -> None:
        put: Callable[..., Any] | None = getattr(queue, "put", None)
        if not callable(put) or isinstance(queue, type):
            raise TypeError(
                f"queue: expected an object with put(), got {type(queue).__name__}: {queue!r}. Pass for example "
                "queue.Queue(maxsize=64)."
            )
        self.queue = queue
        self._takes_timeout = _has_timeout(put)
        self._limit_s = limit_s
        self.write_count = 0
        self.waiting_for: str | None = None
        self.closed = False

    def extend(self, data: TensorDictBase) -> None:
        """Put each row of ``data``, ``[n]``.

        Raises:
            TimeoutError: nobody takes anything.
            QueueClosed: the collector was shut down meanwhile.
        """
        for row in data.unbind(0):
            self.add(row)

    def add(self, data: TensorDictBase) -> None:
        """Put one item."""
        if not self._takes_timeout:
            self.queue.put(data)
            self.write_count += 1
            return
        until = time.monotonic() + self._limit_s
        while True:
            try:
                self.queue.put(data, timeout=_LOOK_S)
                break
            except Exception as error:
                if not _is_full(error):
                    raise
            self.waiting_for = f"room in the queue ({type(self.queue).__name__}), which is full"
            if self.closed:
                self.waiting_for = None
                raise QueueClosed(
                    f"queue: the collector was shut down while it waited for room; {self.write_count} turns were put. "
                    "Take them from the queue before shutdown(), or load the last saved state."
                )
            if time.monotonic() > until:
                raise TimeoutError(
                    f"queue: waited {self._limit_s:g} s for {self.waiting_for}. Take items from it, or make it larger."
                )
        self.waiting_for = None
        self.write_count += 1

    def sample(self, *args: Any, **kwargs: Any) -> NoReturn:
        """There is nothing to sample from."""
        raise RuntimeError("queue: turns are put into a queue, which cannot be sampled from. Call its get().")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "waiting_for": None}


def _has_timeout(put: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(put).parameters
    except (TypeError, ValueError):
        return False
    return "timeout" in parameters


def _is_full(error: Exception) -> bool:
    return isinstance(error, queue.Full) or type(error).__name__ in ("Full", "QueueFull")
