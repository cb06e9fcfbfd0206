"""Ledger: which positions of a ring of rows are reserved, written, published."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollwright._interrupts import uninterrupted
from rollwright._memory import fence
from rollwright.data.replay_buffers.ledger import counters as at
from rollwright.data.replay_buffers.ledger.counters import NO_GAPS, Gaps, Reservation, Reservations, Space
from rollwright.data.replay_buffers.ledger.locks import RowLock

_NAP_S = 0.5e-3
_MOST_PASSED = 1 << 32  # at a clear(): positions are int64, and there may be many


class Span(NamedTuple):
    """Positions that could be read at a moment: ``low <= p < high``, less the gaps.

    Attributes:
        low: the first live position.
        high: the one behind the last.
        revision: of the rows, see :attr:`Ledger.revision`.
    """

    low: int
    high: int
    revision: int


class Room(Protocol):
    """Takes room for elements whose sizes differ, together with the positions that they get; under the lock."""

    def find(self, start: int, stop: int) -> None:
        """Find room for positions ``start <= p < stop``, and change nothing that is read.

        Raises:
            OSError: there is no space on the disk, or in memory; nothing is reserved.
        """

    def take(self, start: int) -> None:
        """Note where the elements from position ``start`` on will lie; they are reserved."""


class Ledger:
    """Counts the positions of a ring: reserve, write, publish.

    A position is a number that only grows; position ``p`` lies in row ``p % capacity``. Whoever writes reserves
    positions, writes their rows, publishes them. Rows are read only where ``low <= p < high``::

        high = end of the published reservations before which all others are settled
        low  = max(end of all reservations - capacity, position at the last clear())

    so a row that is being written is in no reader's range, whichever process writes it. Numbers lie in memory that
    processes may share (or in a file). Each change is committed by one store of an int64, so a process that is killed
    between two stores leaves a valid ledger. The reservation of one that was killed while it wrote becomes a gap: its
    positions hold nothing, and are never read. A :meth:`clear` passes over the positions up to the next that lies in
    row 0: they hold nothing, either.

    Args:
        memory: of :attr:`num_bytes`, zero at first; None: of this process.
        lock: between those who use the memory.
        capacity: number of rows; 0: that of the memory.

    Attributes:
        space: of the rows, which is taken before they are reserved; None: it is there.
        on_reserve: called with the first position of each reservation of this process, under the lock; None: nothing.
        before_rows_change: called under the lock before rows that were published change, or are reserved, and after
            they have changed; None: nothing.
        end: where the last reservation ends.
        writing: see :meth:`RowLock.writing`.

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

    num_bytes = 8 * (at.HEADER + at.SLOT * at.NUM_SLOTS + at.GAP * at.NUM_GAPS)

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
        self.on_reserve: Callable[[int], None] | None = None
        self.before_rows_change: Callable[[], None] | None = None
        self._threads: dict[int, int] = {}  # of this process that reserved what is in progress, by serial
        self._keep_in(memory)
        self.capacity: int = self._head[at.CAPACITY]
        if capacity:
            self.set_capacity(capacity)
        self.writing = self.lock.writing

    def _keep_in(self, memory: memoryview) -> None:
        numbers = memory[: self.num_bytes].cast("q")
        slots = at.HEADER + at.SLOT * at.NUM_SLOTS
        self._head = numbers[: at.HEADER]
        self._gaps = Gaps(self._head, numbers[slots:])
        self._reservations = Reservations(self._head, numbers[at.HEADER : slots], self.lock)
        self.end = self._reservations.end
        self._memory = memory
        self.lock.hint_at(self._head[at.HINT : at.HINT + 1])

    def move(self, memory: memoryview) -> None:
        """Go on in other memory. For use while writing, where nobody is writing rows."""
        memory[: self.num_bytes] = self._memory[: self.num_bytes]
        self._keep_in(memory)

    def is_settled(self) -> bool:
        """Whether nobody is writing rows."""
        return self._reservations.all_settled

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
                in_progress = self._reservations.in_progress()
            if time.monotonic() > until:
                raise TimeoutError(f"waited {self.timeout_s:g} s: {in_progress}. Publish or abandon it first.")
            uninterrupted.deliver()
            time.sleep(_NAP_S)

    def __getstate__(self) -> dict[str, Any]:
        return {"memory": bytes(self._memory[: self.num_bytes]), "timeout_s": self.timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of the numbers, in memory of this process; what shares them hands on the memory itself."""
        Ledger.__init__(self, memoryview(bytearray(state["memory"])), timeout_s=state["timeout_s"])
        self._reservations.abandon_open()
        self._settle()

    def set_capacity(self, capacity: int) -> None:
        """Say how many rows there are, before the first is reserved."""
        self._head[at.CAPACITY] = self.capacity = capacity

    # Trajectory ids ---------------------------------------------------------------------------

    def take_ids(self, n: int) -> int:
        """The first of ``n`` trajectory ids that nobody else was given who writes these rows."""
        with self.writing():
            first = self._head[at.IDS]
            self._head[at.IDS] = first + n
        return first

    def raise_ids(self, least: int) -> int:
        """Give out no id below ``least`` from now on; returns the next one."""
        with self.writing():
            self._head[at.IDS] = max(self._head[at.IDS], least)
            return self._head[at.IDS]

    # Reading ----------------------------------------------------------------------------------

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Hold off writers inside a ``with`` block; what writers that were killed had reserved is settled before it.

        Raises:
            TimeoutError: a writer did not let go in time.
        """
        self.settle()
        return self.lock.reading()

    def live(self) -> tuple[int, int]:
        """``(low, high)``: the positions that may be read, less the gaps of :meth:`gaps`."""
        head = self._head
        high = head[at.PUBLISHED]
        return min(max(self.end() - self.capacity, head[at.BASE]), high), high

    def await_published(self, stop: Callable[[], bool]) -> None:
        """Wait until what was published before this call can be read, which what was reserved before it may hold back.

        Args:
            stop: asked again and again, whether to wait no longer.

        Raises:
            TimeoutError: a process that lives does not publish what it reserved.
        """
        end = self._reservations.end_published()
        self._await_settled(lambda: self._head[at.PUBLISHED] >= end or stop())

    @property
    def is_overwriting(self) -> bool:
        """Whether something that was published cannot be read, since it is being overwritten."""
        head = self._head
        return self.end() - self.capacity > max(head[at.BASE], head[at.PUBLISHED] - self.capacity)

    def await_overwritten(self) -> bool:
        """Wait while what was published is being overwritten, by other threads or processes.

        Returns:
            Whether something can be read, or could after another wait; False, at once, where nothing was published, or
            this thread is writing.

        Raises:
            TimeoutError: a process that lives does not publish what it reserved.
        """
        if self._head[at.PUBLISHED] <= self._head[at.BASE] or threading.get_ident() in list(self._threads.values()):
            return False
        end = self.end()
        self._await_settled(lambda: not self.is_overwriting or self._head[at.PUBLISHED] >= end)
        with self.reading():  # or one could change between the two looks
            return self.num_live() > 0 or self.is_overwriting

    def _await_settled(self, enough: Callable[[], bool]) -> None:
        """Wait until enough can be read; what was reserved before it may hold it back."""
        until = time.monotonic() + self.timeout_s
        while not enough():
            if time.monotonic() > until:
                raise TimeoutError(
                    f"waited {self.timeout_s:g} s until what was written to the replay buffer can be read: "
                    f"{self._reservations.in_progress()}, and keeps what comes behind it from being read. Let who "
                    "reserved it go on, or end it."
                )
            uninterrupted.deliver()
            time.sleep(_NAP_S)
            self.settle()

    def gaps(self, span: Span | None = None) -> NDArray[np.int64]:
        """Gaps in what is live: ``[k, 2]`` ranges of positions that hold nothing, ascending, apart from one another.

        Args:
            span: what is live; None: now.
        """
        head = self._head
        if head[at.GAPS] == head[at.OLDEST_GAP]:
            return NO_GAPS
        low, high, _ = span or self.span()
        return self._gaps.within(low, high)

    def positions(self) -> NDArray[np.int64]:
        """All positions that may be read, ascending."""
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(*each) for each in self.ranges(self.span()))])

    def ranges(self, span: Span, start: int = 0) -> list[tuple[int, int]]:
        """The positions of a span from ``start`` on, less the gaps: ranges ``start <= p < stop``, ascending."""
        begin, found, gaps = max(span.low, start), [], self.gaps(span)
        for gap_start, gap_stop in [*(gaps[gaps[:, 1] > begin].tolist() if len(gaps) else ()), (span.high, span.high)]:
            if begin < gap_start:
                found.append((begin, gap_start))
            begin = max(begin, gap_stop)
        return found

    def span(self) -> Span:
        """What may be read now."""
        revision = self._head[at.REVISION]
        return Span(*self.live(), revision)

    def steady_span(self) -> Span | None:
        """What may be read without the lock, until :meth:`still_holds` returns False; None while rows change."""
        revision = self._head[at.REVISION]
        fence()
        return None if revision % 2 else Span(*self.live(), revision)

    def still_holds(self, span: Span, index: NDArray[np.int64], columns: int) -> bool:
        """Whether nothing was written, since, to elements that could be read then or later: what was read is whole.

        Whoever writes reserves rows, or notes a change in place, before that. For use at any time.

        Args:
            span: of :meth:`steady_span`.
            index: int64 ``[n]``, flat indices of the elements.
            columns: elements in a row.
        """
        fence()
        if self._head[at.REVISION] != span.revision:
            return False
        overwritten = self.end() - self.capacity - span.low
        return overwritten <= 0 or not bool(((index // columns - span.low) % self.capacity < overwritten).any())

    def num_live(self, span: Span | None = None) -> int:
        """Number of positions that may be read.

        Args:
            span: what is live; None: now.
        """
        span = span or self.span()
        gaps = self.gaps(span)
        return span.high - span.low - (int((gaps[:, 1] - gaps[:, 0]).sum()) if len(gaps) else 0)

    def settle(self) -> None:
        """See to reservations whose writer was killed: nobody else may come to do it. While reading it does nothing."""
        if not (self._reservations.all_settled or self.lock.is_read_here or self._reservations.must_wait()):
            with self.writing():  # where nobody is about to sign
                self._settle()

    @property
    def revision(self) -> int:
        """Grows when published rows change in place, or all are dropped: what was derived from them is void.

        Odd while rows change in place, and after somebody was killed who changed them.
        """
        return self._head[at.REVISION]

    @property
    def write_count(self) -> int:
        """Rows given so far: positions published, less those that hold nothing, and rows that were never stored."""
        return self._given - self._head[at.UNCOUNTED]

    @property
    def num_uncounted(self) -> int:
        """Rows given before :meth:`reset_write_count`."""
        return self._head[at.UNCOUNTED]

    @property
    def _given(self) -> int:
        return self._head[at.PUBLISHED] - self._gaps.num_lost + self._head[at.SKIPPED]

    def reset_write_count(self) -> None:
        """Count the rows that are given from now on; positions go on."""
        with self.writing():
            self._head[at.UNCOUNTED] = self._given

    @property
    def num_skipped(self) -> int:
        """Rows that were given and not stored: there was no room for them, or a writer preferred others."""
        return self._head[at.SKIPPED]

    def skip(self, n: int) -> None:
        """Count rows that were given and are not stored."""
        with self.writing():
            self._head[at.SKIPPED] += n

    @property
    def num_lost(self) -> int:
        """Positions that were reserved and never published: their writer was killed, or failed."""
        return self._gaps.num_lost - self._head[at.PASSED]

    @property
    def num_passed(self) -> int:
        """Positions that :meth:`clear` passed over."""
        return self._head[at.PASSED]

    # Writing ----------------------------------------------------------------------------------

    def reserve(self, n: int, room: Room | None = None) -> Reservation:
        """``n`` positions to write; what lay in their rows is no longer read.

        Args:
            n: how many.
            room: for what will be written to them, besides the rows.

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
                taken = self._reserve(n, room)
            if taken is not None:
                return taken
            until = until or time.monotonic() + self.timeout_s
            if time.monotonic() > until:
                raise TimeoutError(
                    f"waited {self.timeout_s:g} s to reserve {n} of {self.capacity} rows: "
                    f"{self._reservations.in_progress()}. Publish or abandon it first, or make the storage larger."
                )
            uninterrupted.deliver()
            time.sleep(_NAP_S)

    def _reserve(self, n: int, room: Room | None) -> Reservation | None:
        self._settle()
        start = self.end()
        if start + n - self.capacity > self._head[at.PUBLISHED] or self._reservations.full:
            return None
        if self.space is not None:
            self.space.make_for(start % self.capacity + n)
        if room is not None:
            room.find(start, start + n)
        taken = self._reservations.add(start, start + n)
        self._threads[taken.serial] = threading.get_ident()
        self._rows_change()
        if self.on_reserve is not None:
            self.on_reserve(start)
        if room is not None:
            room.take(start)  # from here on nobody reads what lay in the rows
        return taken

    def was_published(self, position: int) -> bool:
        """Whether a reservation that began at a position was published; its owner is dead.

        Args:
            position: that readers did not leave behind long ago: gaps are forgotten.
        """
        with self.writing():
            self._settle()
            if position >= self._head[at.PUBLISHED]:
                return self._reservations.is_done(position)
            return not self._gaps.holds(position)

    def publish(self, reservation: Reservation, gaps: Sequence[tuple[int, int]] = ()) -> None:
        """Let everyone read what was written.

        Args:
            reservation: of :meth:`reserve`.
            gaps: ranges of its positions that were not written; they are never read.

        Raises:
            RuntimeError: it was abandoned meanwhile by another process, which took this one for dead; or it belongs to
                another process.
        """
        self._close(reservation, gaps, publish=True)

    def abandon(self, reservation: Reservation) -> None:
        """Abandon what was reserved: nobody reads it."""
        self._close(reservation, (), publish=False)

    def _close(self, reservation: Reservation, gaps: Sequence[tuple[int, int]], *, publish: bool) -> None:
        reservations = self._reservations
        with self.writing():
            self._threads.pop(reservation.serial, None)
            if not reservations.is_mine(reservation):
                if publish:
                    raise RuntimeError(reservations.why_not_mine(reservation))
                return
            try:
                for start, stop in gaps:
                    self._add_gap(start, stop)
                reservations.close(reservation, publish=publish)
            except BaseException:
                reservations.close(reservation, publish=False)
                raise
            finally:
                reservations.release_slot(reservation)
                self._settle()

    def _settle(self) -> None:
        self._reservations.settle(self._add_gap)

    def _add_gap(self, start: int, stop: int) -> None:
        self._gaps.add(start, stop, self.end() - self.capacity)

    @contextlib.contextmanager
    def changing_in_place(self) -> Iterator[None]:
        """Hold off everyone inside a ``with`` block that changes published rows."""
        head = self._head
        with self.writing():
            head[at.REVISION] += 1 + head[at.REVISION] % 2
            self._rows_change()
            fence()
            try:
                yield
            finally:
                fence()
                head[at.REVISION] += 1
                self._rows_change()

    def _rows_change(self) -> None:
        if self.before_rows_change is not None:
            self.before_rows_change()

    def clear(self) -> None:
        """Drop all that is published; what is written next begins at the first row, unless somebody is writing now."""
        with uninterrupted, self.writing():  # or what is passed over could stay reserved
            self._settle()
            if self.is_settled() and 0 < self.capacity <= _MOST_PASSED:
                self._pass_over(-self.end() % self.capacity)
            self._set_base(self.end())
            self._head[at.REVISION] += 2
            self._rows_change()

    def clear_with(self, rows: dict[int, Any]) -> None:
        """:meth:`clear`, and let go of what lies in the rows of this process."""
        before = list(rows.items())
        self.clear()
        with self.writing():
            for row, held in before:
                if rows.get(row) is held:  # else it was written since
                    del rows[row]

    def _pass_over(self, n: int) -> None:
        """Let positions hold nothing, as those of a reservation that was abandoned."""
        if not n:
            return
        taken = self._reservations.add(self.end(), self.end() + n)
        self._reservations.close(taken, publish=False)
        self._reservations.release_slot(taken)
        self._settle()
        self._head[at.PASSED] += n

    def _set_base(self, base: int) -> None:
        self._head[at.BASE_CHECK] = ~base
        self._head[at.BASE] = base

    def numbers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Views of header, slots of reservations ``[at.NUM_SLOTS, 4]`` and gaps ``[at.NUM_GAPS, 4]``."""
        return np.frombuffer(self._head, np.int64), self._reservations.array(), self._gaps.array

    def drop_below(self, low: int) -> int:
        """Drop what is published below a position; returns how many were. For use while writing."""
        before = self.num_live()
        low_now, high = self.live()
        if low > low_now:
            self._set_base(min(low, high))
        return before - self.num_live()

    def repair_base(self) -> None:
        """Finish what a process was killed at between the two stores of the base. For use while writing."""
        base, check = self._head[at.BASE], ~self._head[at.BASE_CHECK]
        self._set_base(max(base, check))

    @contextlib.contextmanager
    def restoring(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Hold off everyone inside a ``with`` block that writes the rows of a saved storage; then take its positions.

        Args:
            state: ``low``, ``high``, ``voids`` (the gaps), ``lost``, ``skipped``, ``uncounted`` and ``passed`` of what
                was saved.

        Raises:
            RuntimeError: somebody is writing rows; the block does not begin.
        """
        head, gaps, passed = self._head, state["voids"].tolist(), int(state.get("passed", 0))
        lost = int(state["lost"]) + passed - sum(stop - start for start, stop in gaps)
        with self.changing_in_place():
            self._check_at_rest()
            yield
            self._reservations.begin_at(state["high"])
            head[at.PASSED] = passed
            self._gaps.begin(lost)
            self._set_base(state["low"])
            for start, stop in gaps:
                self._add_gap(start, stop)
            head[at.SKIPPED] = state.get("skipped", 0)
            head[at.UNCOUNTED] = state.get("uncounted", 0)
            head[at.IDS] = max(head[at.IDS], state.get("ids", 0))

    def check_at_rest(self) -> None:
        """Test that nobody is writing rows, so that a state can be loaded.

        Raises:
            RuntimeError: somebody is.
        """
        with self.writing():
            self._check_at_rest()

    def _check_at_rest(self) -> None:
        self._settle()
        if not self.is_settled():
            raise RuntimeError(
                f"load_state_dict: {self._reservations.in_progress()}. Load when nobody writes: pause or shut down the "
                "collector."
            )

    @property
    def next_id(self) -> int:
        """The trajectory id to be given out next."""
        return self._head[at.IDS]

    @contextlib.contextmanager
    def writes(self, n: int, skipped: int = 0, room: Room | None = None) -> Iterator[Reservation]:
        """Reserve, run the block, publish and count what was skipped before it; abandon where the block raises."""
        with uninterrupted:
            reservation = self.reserve(n, room)
            try:
                yield reservation
                if skipped:
                    self.skip(skipped)
            except BaseException:
                self.abandon(reservation)
                raise
            self.publish(reservation)
