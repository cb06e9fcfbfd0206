"""The parts of a buffer in a service, as far as whoever writes to it asks for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rollwright.data.replay_buffers.service.messages import Info
from rollwright.data.replay_buffers.service.session import Session

_IDS = 64  # trajectory ids that are taken at a time
_NAP_S = 0.005


def _never() -> bool:
    return False


class RemoteLedger:
    """Trajectory ids of a buffer in a service, and whether writes were carried out.

    Args:
        session: to the service, of the writer.
        asks: session that asks whether writes were carried out: that of another process must not use the writer's.

    Attributes:
        on_reserve: called with a number before each write, by which :meth:`was_published` knows it.
    """

    def __init__(self, session: Session, asks: Session) -> None:
        self._session, self._asks = session, asks
        self._next = self._end = 0
        self.on_reserve: Callable[[int], None] | None = None

    def take_ids(self, n: int) -> int:
        """The first of ``n`` trajectory ids that nobody else was given; they are fetched in blocks."""
        if self._end - self._next < n:
            count = max(n, _IDS)
            self._next = self._session.ask("take_ids", count)
            self._end = self._next + count
        first, self._next = self._next, self._next + n
        return first

    def raise_ids(self, least: int) -> int:
        """Give out no id below ``least`` from now on; returns the next one."""
        if least > self._next:
            self._next = self._end = 0
            return int(self._session.ask("raise_ids", least))
        return self._next

    def was_published(self, number: int) -> bool:
        """Whether the write of this number of this writer was carried out."""
        return bool(self._asks.ask("was_done", self._session.client_id, number))

    def await_published(self, stop: Callable[[], bool] = _never) -> None:
        """There is nothing to wait for: what was acknowledged can be read."""


class RemoteStorage:
    """What is known of the storage of a buffer in a service.

    Args:
        info: on the buffer.
        ledger: see :class:`RemoteLedger`.

    Attributes:
        ledger: see above.
        shared: True: others may write.
    """

    shared = True

    def __init__(self, info: Info, ledger: RemoteLedger) -> None:
        self._info, self.ledger = info, ledger

    @property
    def max_size(self) -> int:
        """Elements that it has room for."""
        return self._info.max_size

    @property
    def ndim(self) -> int:
        """Dimensions that distinguish elements."""
        return self._info.ndim

    @property
    def keeps_objects(self) -> bool:
        """Whether entries may be text and other objects."""
        return self._info.keeps_objects

    def __repr__(self) -> str:
        return f"{self._info.storage}(max_size={self._info.max_size}, in a service)"


class RemoteLimiter:
    """The limiter of a buffer in a service, for those who sample there and for collectors.

    Args:
        session: to the service.
        timeout_s: how long one side waits without any sign of the other.
    """

    def __init__(self, session: Session, timeout_s: float) -> None:
        self._session, self.timeout_s = session, timeout_s
        self._listeners: list[Callable[[], None]] = []
        self._inserters: list[Callable[[], str]] = []

    def check(self, *, frames: int | None = None, batch_size: int | None = None) -> None:
        """See :meth:`SampleToInsertRatio.check`."""
        self._session.ask("limiter_check", frames, batch_size)

    def may_insert(self, frames: int) -> bool:
        """See :meth:`SampleToInsertRatio.may_insert`."""
        return bool(self._session.ask("limiter_may_insert", frames))

    def wants(self, frames: int) -> str:
        """See :meth:`SampleToInsertRatio.wants`."""
        return str(self._session.ask("limiter_wants", frames))

    def stats(self) -> dict[str, Any]:
        """See :meth:`SampleToInsertRatio.stats`."""
        found: dict[str, Any] = self._session.ask("limiter_stats")
        return found

    @property
    def balance(self) -> float:
        """See :class:`SampleToInsertRatio`."""
        return float(self.stats()["balance"])

    def await_insert(self, frames: int, *, stop: Callable[[], bool] = _never, whom: str = "the collector") -> bool:
        """See :meth:`SampleToInsertRatio.await_insert`.

        Raises:
            TimeoutError: nothing was drawn for ``timeout_s``.
        """
        sampled, since = -1, time.monotonic()
        while not self.may_insert(frames):
            if stop():
                return False
            now, drawn = time.monotonic(), int(self.stats()["sampled"])
            if drawn != sampled:
                sampled, since = drawn, now
            elif now - since > self.timeout_s:
                raise TimeoutError(
                    f"{whom} waited {self.timeout_s:g} s to insert {frames} items, and nothing was drawn: "
                    f"{self.wants(frames)}. Draw more batches, or pass a larger margin."
                )
            time.sleep(_NAP_S)
        return True

    def inserted_more(self) -> None:
        """The service notices by itself."""

    def begin(self) -> None:
        """The service does it."""

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback()`` whenever this process has drawn something; returns what takes it back."""
        return _added(self._listeners, callback)

    def add_inserter(self, status: Callable[[], str]) -> Callable[[], None]:
        """Let sampling ask, while it waits, what became of somebody who inserts; returns what takes it back."""
        return _added(self._inserters, status)

    def drew(self) -> None:
        """Something was drawn here."""
        for callback in list(self._listeners):
            callback()

    def ask_inserters(self) -> None:
        """Raise what went wrong with those who insert."""
        for status in list(self._inserters):
            status()


def _added(to: list[Any], what: Any) -> Callable[[], None]:
    to.append(what)

    def remove() -> None:
        if what in to:
            to.remove(what)

    return remove
