"""Ledger: which positions of a ring of rows are reserved, written, published."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwright._interrupts import uninterrupted
from rollwright._processes.fences import fence
from rollwright.data.replay_buffers._locks import RowLock
from rollwright.data.replay_buffers._space import Space

__all__ = ["Ledger", "Reservation", "Span"]

_SLOTS, _VOIDS = 512, 8192  # reservations under way at a time, and gaps remembered
_HEADER, _SLOT, _VOID = 16, 4, 4  # int64 numbers in each
_CAPACITY, _ISSUED, _SETTLED, _PUBLISHED, _BASE, _REVISION, _GAPS, _OLDEST_GAP, _IDS, _HINT = range(10)
_SKIPPED, _BASE_CHECK = _HEADER - 2, _HEADER - 1  # rows that were given and have no position; ~base
_START, _STOP, _STATE, _OWNER = range(4)
_LOST = 2  # beside start and stop of a gap: positions lost so far
_OPEN, _DONE, _ABANDONED = range(1, 4)
_NAP_S = 0.5e-3
_NO_GAPS = np.zeros((0, 2), np.int64)


class Reservation(NamedTuple):
    """Positions ``start <= p < stop`` that nobody reads until they are published."""

    start: int
    stop: int
    serial: int


class Span(NamedTuple):
    """What could be read at a moment.

    Attributes:
        low: the first live position.
        revision: of the rows.
    """

    low: int
    revision: int


class Ledger:
    """Counts the positions of a ring: reserve, write, publish.

    A position is a number that only grows; position ``p`` lies in row ``p % capacity``. Whoever writes reserves
    positions, writes their rows, publishes them. Rows are read only where ``low <= p < high``::

        high = end of the published reservations before which all others are settled
        low  = max(end of all reservations - capacity, position at the last clear())

    so a row that is being written is in no reader's range, whichever process writes it. Numbers lie in memory that
    processes may share (or in a file). Each change is committed by one store of an int64, so a process that is killed
    between two stores leaves a valid ledger. The reservation of one that was killed while it wrote becomes a gap: its
    positions hold nothing, and are never read.

    Args:
        memory: of :attr:`num_bytes`, zero at first; None: of this process.
        lock: between those who use the memory.
        capacity: number of rows; 0: as the memory says.

    Attributes:
        space: of the rows, which is taken before they are reserved; None: it is there.

    Example:
        >>> ledger = Ledger(capacity=4)
        >>> rows = ledger.reserve(3)
        >>> ledger.live()
        (0, 0)
        >>> ledger.publish(rows)
        >>> ledger.live()
        (0, 3)
        >>> ledger.publish(ledger.reserve(3))
        >>> ledger.live()
        (2, 6)
    """

    num_bytes = 8 * (_HEADER + _SLOT * _SLOTS + _VOID * _VOIDS)

    def __init__(
        self,
        memory: memoryview | None = None,
        lock: RowLock | None = None,
        *,
        capacity: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        memory = memoryview(bytearray(self.num_bytes)) if memory is None else memory
        self.lock = RowLock() if lock is None else lock
        self.timeout_s = timeout_s
        self.space: Space | None = None
        self._keep_in(memory)
        self.capacity: int = self._head[_CAPACITY]
        if capacity:
            self.set_capacity(capacity)
        self.reading, self.writing = self.lock.reading, self.lock.writing

    def _keep_in(self, memory: memoryview) -> None:
        numbers = memory[: self.num_bytes].cast("q")
        slots = _HEADER + _SLOT * _SLOTS
        self._head, self._slots, self._gap_list = numbers[:_HEADER], numbers[_HEADER:slots], numbers[slots:]
        self._gap_array = np.frombuffer(self._gap_list, np.int64).reshape(-1, _VOID)
        self._memory = memory
        self.lock.hint_at(self._head[_HINT : _HINT + 1])

    def move(self, memory: memoryview) -> None:
        """Go on in other memory. For use while writing, where nobody is writing rows."""
        memory[: self.num_bytes] = self._memory[: self.num_bytes]
        self._keep_in(memory)

    def is_settled(self) -> bool:
        """Whether nobody is writing rows."""
        return self._head[_SETTLED] == self._head[_ISSUED]

    @property
    def num_begun(self) -> int:
        """Rows that something was written to, ever: the first so many."""
        return min(self.end(), self.capacity)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Hold off everyone inside a ``with`` block, which begins when nobody is writing rows.

        Raises:
            TimeoutError: rows are still being written.
        """
        until = time.monotonic() + self.timeout_s
        while True:
            with self.writing():
                self._settle()
                if self.is_settled():
                    yield
                    return
                under_way = self._under_way()
            if time.monotonic() > until:
                raise TimeoutError(f"waited {self.timeout_s:g} s: {under_way}. Publish or abandon it first.")
            uninterrupted.deliver()
            time.sleep(_NAP_S)

    def __getstate__(self) -> dict[str, Any]:
        return {"memory": bytes(self._memory[: self.num_bytes]), "timeout_s": self.timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of the numbers, in memory of this process; what shares them hands on the memory itself."""
        Ledger.__init__(self, memoryview(bytearray(state["memory"])), timeout_s=state["timeout_s"])
        for serial in range(self._head[_SETTLED], self._head[_ISSUED]):  # nobody will publish into the copy
            at = _SLOT * (serial % _SLOTS) + _STATE
            self._slots[at] = _DONE if self._slots[at] == _DONE else _ABANDONED
        self._settle()

    def set_capacity(self, capacity: int) -> None:
        """Say how many rows there are, before the first is reserved."""
        self._head[_CAPACITY] = self.capacity = capacity

    # Trajectory ids ---------------------------------------------------------------------------

    def take_ids(self, n: int) -> int:
        """The first of ``n`` trajectory ids that nobody else was given who writes these rows."""
        with self.writing():
            first = self._head[_IDS]
            self._head[_IDS] = first + n
        return first

    def raise_ids(self, least: int) -> int:
        """Give out no id below ``least`` from now on; returns the next one."""
        with self.writing():
            self._head[_IDS] = max(self._head[_IDS], least)
            return self._head[_IDS]

    # Reading ----------------------------------------------------------------------------------

    def live(self) -> tuple[int, int]:
        """``(low, high)``: the positions that may be read, less the gaps of :meth:`voids`."""
        head = self._head
        high = head[_PUBLISHED]
        return min(max(self.end() - self.capacity, head[_BASE]), high), high

    def end(self) -> int:
        """Where the last reservation ends."""
        head = self._head
        if head[_SETTLED] == head[_ISSUED]:
            return head[_PUBLISHED]
        return self._slots[_SLOT * ((head[_ISSUED] - 1) % _SLOTS) + _STOP]

    def await_published(self, stop: Callable[[], bool]) -> None:
        """Wait until what was published before this call can be read, which what was reserved before it may hold back.

        Args:
            stop: asked again and again, whether to wait no longer.

        Raises:
            TimeoutError: a process that lives does not publish what it reserved.
        """
        end = self._end_published()
        until = time.monotonic() + self.timeout_s
        while self._head[_PUBLISHED] < end and not stop():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"waited {self.timeout_s:g} s until what was written to the replay buffer can be read: "
                    f"{self._under_way()}, and keeps what comes behind it from being read. End that process, or let "
                    "it go on."
                )
            time.sleep(_NAP_S)
            self.settle()

    def _end_published(self) -> int:
        """Where the last published reservation ends, whether it can be read yet or not."""
        head = self._head
        for serial in range(head[_ISSUED] - 1, head[_SETTLED] - 1, -1):
            at = _SLOT * (serial % _SLOTS)
            if self._slots[at + _STATE] == _DONE:
                return self._slots[at + _STOP]
        return head[_PUBLISHED]

    def voids(self) -> NDArray[np.int64]:
        """Gaps in what is live: ``[k, 2]`` ranges of positions that hold nothing, ascending, apart from one another."""
        head = self._head
        if head[_GAPS] == head[_OLDEST_GAP]:
            return _NO_GAPS
        gaps = self._gap_array[np.arange(head[_OLDEST_GAP], head[_GAPS]) % _VOIDS, :2]
        gaps = np.clip(gaps, *self.live())
        gaps = gaps[gaps[:, 1] > gaps[:, 0]]
        gaps = gaps[np.argsort(gaps[:, 0], kind="stable")]
        if len(gaps) < 2:
            return gaps
        reached = np.maximum.accumulate(gaps[:, 1])
        first = np.append(True, gaps[1:, 0] > reached[:-1])  # a writer killed while it gave up leaves a gap twice
        return np.stack([gaps[first, 0], np.maximum.reduceat(gaps[:, 1], np.flatnonzero(first))], 1)

    def positions(self) -> NDArray[np.int64]:
        """All positions that may be read, ascending."""
        positions = np.arange(*self.live())
        for start, stop in self.voids().tolist():
            positions = positions[(positions < start) | (positions >= stop)]
        return positions

    def span(self) -> Span:
        """What may be read now. For use while reading."""
        return Span(self.live()[0], self._head[_REVISION])

    def still_holds(self, span: Span, index: NDArray[np.int64], columns: int) -> bool:
        """Whether nothing was written, since, to elements that could be read then: what was read of them is whole.

        Whoever writes reserves rows, or notes a change in place, before that. For use at any time.

        Args:
            span: of :meth:`span`.
            index: int64 ``[n]``, flat indices of the elements.
            columns: elements in a row.
        """
        fence()
        if self._head[_REVISION] != span.revision:
            return False
        overwritten = self.end() - self.capacity - span.low
        return overwritten <= 0 or not bool(((index // columns - span.low) % self.capacity < overwritten).any())

    def num_live(self) -> int:
        """Number of positions that may be read."""
        low, high = self.live()
        voids = self.voids()
        return high - low - (int((voids[:, 1] - voids[:, 0]).sum()) if len(voids) else 0)

    def settle(self) -> None:
        """See to reservations whose writer was killed: nobody else may come to do it. Not for use while reading."""
        head = self._head
        if head[_SETTLED] != head[_ISSUED]:
            at = head[_SETTLED] % _SLOTS
            if self._slots[_SLOT * at + _STATE] == _OPEN and (
                self._slots[_SLOT * at + _OWNER] == _me() or self.lock.is_seen_signed(at)
            ):
                return
            with self.writing():  # where nobody is about to sign
                self._settle()

    @property
    def revision(self) -> int:
        """Grows when published rows change in place, or all are dropped: what was derived from them is void."""
        return self._head[_REVISION]

    @property
    def write_count(self) -> int:
        """Rows given so far: positions published, less those that hold nothing, and rows that were never stored."""
        return self._head[_PUBLISHED] - self.num_lost + self._head[_SKIPPED]

    @property
    def num_skipped(self) -> int:
        """Rows that were given and not stored: there was no room for them, or a writer preferred others."""
        return self._head[_SKIPPED]

    def skip(self, n: int) -> None:
        """Count rows that were given and are not stored."""
        with self.writing():
            self._head[_SKIPPED] += n

    @property
    def num_lost(self) -> int:
        """Positions that were reserved and never published: their writer was killed, or failed."""
        gaps = self._head[_GAPS]
        return self._gap_list[_VOID * ((gaps - 1) % _VOIDS) + _LOST] if gaps else 0

    # Writing ----------------------------------------------------------------------------------

    def reserve(self, n: int) -> Reservation:
        """``n`` positions to write; what lay in their rows is no longer read.

        Raises:
            ValueError: there are fewer rows.
            OSError: there is no space for them on the disk; nothing is reserved.
            TimeoutError: rows of this one are still being written by another reservation.
        """
        if not 0 < n <= self.capacity:
            raise ValueError(f"expected to reserve 1 to {self.capacity} rows, got {n}. Make the storage larger.")
        until = None
        while True:
            with self.writing():
                taken = self._reserve(n)
            if taken is not None:
                return taken
            until = until or time.monotonic() + self.timeout_s
            if time.monotonic() > until:
                raise TimeoutError(
                    f"waited {self.timeout_s:g} s to reserve {n} of {self.capacity} rows: {self._under_way()}. "
                    "Publish or abandon it first, or make the storage larger."
                )
            uninterrupted.deliver()
            time.sleep(_NAP_S)

    def _reserve(self, n: int) -> Reservation | None:
        head, slots = self._head, self._slots
        self._settle()
        start, serial = self.end(), head[_ISSUED]
        if start + n - self.capacity > head[_PUBLISHED] or serial - head[_SETTLED] == _SLOTS:
            return None
        if self.space is not None:
            self.space.make_for(start + n)
        at = serial % _SLOTS
        self.lock.sign(at)
        slots[_SLOT * at + _START], slots[_SLOT * at + _STOP] = start, start + n
        slots[_SLOT * at + _OWNER], slots[_SLOT * at + _STATE] = _me(), _OPEN
        head[_ISSUED] = serial + 1  # from here on the rows are nobody's to read
        return Reservation(start, start + n, serial)

    def publish(self, reservation: Reservation, voids: Sequence[tuple[int, int]] = ()) -> None:
        """Let everyone read what was written.

        Args:
            reservation: of :meth:`reserve`.
            voids: ranges of its positions that were not written; they are never read.

        Raises:
            RuntimeError: it was given up meanwhile by another process, which took this one for dead; or it belongs to
                another process.
        """
        self._close(reservation, voids, _DONE)

    def abandon(self, reservation: Reservation) -> None:
        """Give up what was reserved: nobody reads it."""
        self._close(reservation, (), _ABANDONED)

    def _close(self, reservation: Reservation, voids: Sequence[tuple[int, int]], state: int) -> None:
        at = reservation.serial % _SLOTS
        with self.writing():
            if not self._is_mine(reservation):
                if state == _DONE:
                    raise RuntimeError(self._lost(reservation))
                return
            try:
                for start, stop in voids:
                    self._add_gap(start, stop)
                self._slots[_SLOT * at + _STATE] = state
            except BaseException:
                self._slots[_SLOT * at + _STATE] = _ABANDONED
                raise
            finally:
                self.lock.resign(at)  # before anyone else can come by the slot
                self._settle()

    def _is_mine(self, reservation: Reservation) -> bool:
        at = _SLOT * (reservation.serial % _SLOTS)
        return reservation.serial >= self._head[_SETTLED] and self._slots[at + _OWNER] == _me()

    def _lost(self, reservation: Reservation) -> str:
        rows = f"publish: the {reservation.stop - reservation.start} rows from position {reservation.start} are lost: "
        if reservation.serial >= self._head[_SETTLED]:
            return rows + "another process reserved them, which this one was forked from. Reserve rows of its own here."
        return rows + (
            "another process gave them up, since nobody held the lock that says that this process lives. The system "
            "drops it when this process closes any descriptor of the buffer's lock file: when it copies its folder, "
            "say. Write them again; copy the folder from another process, or use dumps()."
        )

    def _settle(self) -> None:
        """Move on over reservations that are closed, or whose owner is dead."""
        head, slots = self._head, self._slots
        while head[_SETTLED] < head[_ISSUED]:
            at = head[_SETTLED] % _SLOTS
            start, stop, state, owner = slots[_SLOT * at : _SLOT * (at + 1)]
            if state == _OPEN and (owner == _me() or self.lock.is_signed(at)):
                return
            if state != _DONE:
                self._add_gap(start, stop)
            head[_PUBLISHED] = stop
            head[_SETTLED] += 1

    def _add_gap(self, start: int, stop: int) -> None:
        if stop <= start:
            return
        head, gaps, lost = self._head, self._gap_list, self.num_lost
        low = self.end() - self.capacity
        while head[_OLDEST_GAP] < head[_GAPS] and gaps[_VOID * (head[_OLDEST_GAP] % _VOIDS) + 1] <= low:
            head[_OLDEST_GAP] += 1
        if head[_GAPS] > head[_OLDEST_GAP]:
            last = _VOID * ((head[_GAPS] - 1) % _VOIDS)
            if gaps[last] <= start and stop <= gaps[last + 1]:
                return  # a writer killed between two stores had noted it already
            if gaps[last + 1] == start:
                gaps[last + 1], gaps[last + _LOST] = stop, lost + stop - start
                return
            if head[_GAPS] - head[_OLDEST_GAP] == _VOIDS:  # more than are remembered: what lies between is given up too
                gaps[last] = min(start, gaps[last])
                gaps[last + 1], gaps[last + _LOST] = max(stop, gaps[last + 1]), lost + stop - start
                return
        at = _VOID * (head[_GAPS] % _VOIDS)
        gaps[at], gaps[at + 1], gaps[at + _LOST] = start, stop, lost + stop - start
        head[_GAPS] += 1

    def _under_way(self) -> str:
        at = self._head[_SETTLED] % _SLOTS
        start, stop, _, owner = self._slots[_SLOT * at : _SLOT * (at + 1)]
        whose = "this process" if owner == _me() else "another process"
        return f"a reservation of {stop - start} rows by {whose} is not published yet"

    def changed_in_place(self) -> None:
        """Note that published rows are about to be changed. For use while writing."""
        self._head[_REVISION] += 1

    def clear(self) -> None:
        """Drop all that is published."""
        with self.writing():
            self._set_base(self.end())
            self._head[_REVISION] += 1

    def _set_base(self, base: int) -> None:
        self._head[_BASE_CHECK] = ~base
        self._head[_BASE] = base

    def numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Views of header, slots of reservations ``[_SLOTS, 4]`` and gaps ``[_VOIDS, 4]``."""
        slots = np.frombuffer(self._slots, np.int64).reshape(-1, _SLOT)
        return np.frombuffer(self._head, np.int64), slots, self._gap_array

    def repair_base(self) -> None:
        """Finish what a process was killed at between the two stores of the base. For use while writing."""
        base, check = self._head[_BASE], ~self._head[_BASE_CHECK]
        self._set_base(max(base, check))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the positions of a saved storage. For use while writing.

        Args:
            state: ``low``, ``high``, ``voids``, ``lost`` and ``skipped`` of what was saved.

        Raises:
            RuntimeError: somebody is writing rows.
        """
        head = self._head
        self._settle()
        if head[_SETTLED] != head[_ISSUED]:
            raise RuntimeError(
                f"load_state_dict: {self._under_way()}. Load when nobody writes: pause or shut down the collector."
            )
        high, at = state["high"], head[_ISSUED] % _SLOTS
        self.numbers()[1][at] = high, high, _DONE, _me()
        head[_PUBLISHED] = high  # as the end of that reservation says
        head[_ISSUED] += 1
        head[_SETTLED] += 1
        head[_OLDEST_GAP] = head[_GAPS] = 0
        self._gap_array[:] = 0
        voids = state["voids"].tolist()
        before = state["lost"] - sum(stop - start for start, stop in voids)
        if before > 0:  # a gap that nobody reads any more keeps the count
            self._gap_list[_LOST], head[_GAPS], head[_OLDEST_GAP] = before, 1, 1
        self._set_base(state["low"])
        for start, stop in voids:
            self._add_gap(start, stop)
        head[_SKIPPED] = state.get("skipped", 0)
        head[_IDS] = max(head[_IDS], state.get("ids", 0))
        head[_REVISION] += 1

    @property
    def next_id(self) -> int:
        """The trajectory id to be given out next."""
        return self._head[_IDS]

    @contextlib.contextmanager
    def writes(self, n: int, skipped: int = 0) -> Iterator[Reservation]:
        """Reserve, run the block, publish and count what was skipped before it; abandon where the block raises."""
        with uninterrupted:
            reservation = self.reserve(n)
            try:
                yield reservation
                if skipped:
                    self.skip(skipped)
            except BaseException:
                self.abandon(reservation)
                raise
            self.publish(reservation)


def _new_identity() -> int:
    return int.from_bytes(os.urandom(7), "little")


_identity = _new_identity()


def _renew_identity() -> None:
    global _identity
    _identity = _new_identity()


os.register_at_fork(after_in_child=_renew_identity)  # where there is one thread: each has the same, from the first use


def _me() -> int:
    """A number that no other process has or had."""
    return _identity
