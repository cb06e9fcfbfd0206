"""Turns are put into a queue, one at a time, where other collectors write into a replay buffer."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright.collectors.rollout.state import td_state
from rollwright.data.layout import TRAJ_IDS
from rollwright.errors import RollwrightError

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
        rest: what is left of data of which a part is in the queue, because ``put`` raised.

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
        self.rest: list[TensorDictBase] = []

    def extend(self, data: TensorDictBase) -> None:
        """Put each row of ``data``, ``[n]``; where that fails behind the first, :attr:`rest` has what is left.

        Raises:
            TimeoutError: nobody takes anything.
            QueueClosed: the collector was shut down meanwhile.
        """
        rows = list(data.unbind(0))
        for number, row in enumerate(rows):
            try:
                self.add(row)
            except BaseException:
                self.rest = rows[number:] if number else []
                raise

    def put_rest(self) -> None:
        """Put what was left.

        Raises:
            TimeoutError, QueueClosed: see :meth:`extend`; what was not put stays.
        """
        while self.rest:
            self.add(self.rest[0])
            del self.rest[0]

    def add(self, data: TensorDictBase) -> None:
        """Put one item."""
        self.put(lambda: self.try_put(data))

    def try_put(self, data: TensorDictBase) -> bool:
        """Put one item; False where the queue stays full for a moment."""
        try:
            if self._takes_timeout:
                self.queue.put(data, timeout=_LOOK_S)
            else:
                self.queue.put(data)
        except Exception as error:
            if not self._takes_timeout or not _is_full(error):
                raise
            return False
        self.write_count += 1
        return True

    def put(self, attempt: Callable[[], bool]) -> None:
        """Attempt to put something until that succeeds.

        Raises:
            TimeoutError, QueueClosed: see :meth:`extend`.
        """
        until = time.monotonic() + self._limit_s
        while not attempt():
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

    def sample(self, *args: Any, **kwargs: Any) -> NoReturn:
        """There is nothing to sample from."""
        raise RuntimeError("queue: turns are put into a queue, which cannot be sampled from. Call its get().")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "waiting_for": None}


class QueueBacklog:
    """Turns that workers have collected, and that the collector's process puts into a queue, each once.

    A worker that is killed has put nothing itself: what has arrived of it is put, and the rest is collected again.

    Args:
        writer: puts them.

    Attributes:
        lock: while it is held, nothing arrives, and nothing is put.
        writer: see above.
    """

    def __init__(self, writer: QueueWriter) -> None:
        self.writer = writer
        self.lock = threading.RLock()
        self._rows: deque[TensorDictBase] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    @contextmanager
    def taking(self) -> Iterator[Callable[[Any], None]]:
        """What adds a batch, ``[n]``; from then on, the lock is held until the end of the ``with`` block."""
        with ExitStack() as held:

            def take(batch: TensorDictBase | None) -> None:
                held.enter_context(self.lock)
                if batch is not None:
                    self._rows.extend(row for row in batch.reshape(-1).unbind(0) if _is_turn(row))

            yield take

    def drain(self) -> None:
        """Put all turns.

        Raises:
            TimeoutError, QueueClosed: see :meth:`QueueWriter.extend`; the turns that were not put stay.
        """
        while self._rows:
            self.writer.put(self._put_first)

    def _put_first(self) -> bool:
        with self.lock, uninterrupted:
            if self._rows and not self.writer.try_put(self._rows[0]):
                return False
            if self._rows:
                self._rows.popleft()
            return True

    def clear(self) -> None:
        """Drop all turns."""
        with self.lock:
            self._rows.clear()

    def state_dict(self) -> list[Any]:
        """Turns that were not put."""
        return [td_state(row) for row in self._rows]

    def restore(self, turns: Sequence[Any]) -> None:
        """Hold these turns, and no others."""
        with self.lock:
            self._rows = deque(turns)


def _is_turn(row: TensorDictBase) -> bool:
    """Whether a row was taken, and is no padding."""
    ids = row.get(TRAJ_IDS, None)
    return ids is None or bool(ids >= 0)


def _has_timeout(put: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(put).parameters
    except (TypeError, ValueError):
        return False
    return "timeout" in parameters


def _is_full(error: Exception) -> bool:
    return isinstance(error, queue.Full) or type(error).__name__ in ("Full", "QueueFull")
