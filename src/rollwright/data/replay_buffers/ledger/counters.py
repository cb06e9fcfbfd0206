"""Numbers of a ledger: what lies where, reservations, gaps, space on the disk, and what cannot be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwright._memory import Layout, Segment
from rollwright.data.replay_buffers.ledger.locks import RowLock

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.ledger.ledger import Ledger

NUM_SLOTS, NUM_GAPS = 512, 8192  # reservations in progress at a time, and gaps remembered
HEADER, SLOT, GAP = 16, 4, 4  # numbers in each; the header comes first, then the slots, then the gaps

# In the header
CAPACITY, ISSUED, SETTLED, PUBLISHED, BASE, REVISION, GAPS, OLDEST_GAP, IDS, HINT = range(10)
UNCOUNTED = 10  # rows given before the count of rows was last set back
PASSED = 11  # positions that were passed over, so that what is written after a clear() begins at the first row
SKIPPED, BASE_CHECK = HEADER - 2, HEADER - 1  # rows that were given and have no position; ~base

# In a slot
START, STOP, STATE, OWNER = range(4)
OPEN, DONE, ABANDONED = range(1, 4)  # states

# In a gap, beside start and stop
LOST = 2  # positions lost so far


@cache
def me() -> int:
    """A number that identifies this process in reservations, which no other process has or had."""
    return int.from_bytes(os.urandom(7), "little")


os.register_at_fork(after_in_child=me.cache_clear)
os.register_at_fork(after_in_child=me)  # where there is one thread: each has the same, from the first use
me()


class Reservation(NamedTuple):
    """Positions ``start <= p < stop`` that nobody reads until they are published."""

    start: int
    stop: int
    serial: int


class Reservations:
    """A ring of reservations, in the memory of a ledger: ``settled <= serial < issued`` are in progress.

    Each change is committed by one store of an int64, as all of the ledger is. They are changed under its lock.

    Args:
        head: header of the ledger.
        slots: a slot for each reservation in progress.
        lock: whose slots owners hold as long as they live.
    """

    def __init__(self, head: memoryview, slots: memoryview, lock: RowLock) -> None:
        self._head, self._slots, self._lock = head, slots, lock

    def array(self) -> NDArray[np.int64]:
        """A view of the slots, ``[NUM_SLOTS, 4]``."""
        return np.frombuffer(self._slots, np.int64).reshape(-1, SLOT)

    @property
    def all_settled(self) -> bool:
        """Whether nobody is writing rows."""
        return self._head[SETTLED] == self._head[ISSUED]

    def end(self) -> int:
        """Where the last reservation ends. For use at any time."""
        head = self._head
        while True:
            issued = head[ISSUED]
            if head[SETTLED] == issued:
                return head[PUBLISHED]
            stop = self._slots[SLOT * ((issued - 1) % NUM_SLOTS) + STOP]
            if head[ISSUED] == issued:  # else its slot may have been given to another meanwhile
                return stop

    def end_published(self) -> int:
        """Where the last published reservation ends, whether it can be read yet or not."""
        head = self._head
        for serial in range(head[ISSUED] - 1, head[SETTLED] - 1, -1):
            at = SLOT * (serial % NUM_SLOTS)
            if self._slots[at + STATE] == DONE:
                return self._slots[at + STOP]
        return head[PUBLISHED]

    def is_done(self, start: int) -> bool:
        """Whether the one in progress that begins at a position is published, though it cannot be read yet."""
        for serial in range(self._head[SETTLED], self._head[ISSUED]):
            at = SLOT * (serial % NUM_SLOTS)
            if self._slots[at + START] == start:
                return bool(self._slots[at + STATE] == DONE)
        return False

    @property
    def full(self) -> bool:
        """Whether no other can be added."""
        return self._head[ISSUED] - self._head[SETTLED] == NUM_SLOTS

    def add(self, start: int, stop: int) -> Reservation:
        """Reserve positions for this process."""
        head, slots, serial = self._head, self._slots, self._head[ISSUED]
        at = serial % NUM_SLOTS
        self._lock.hold_slot(at)
        slots[SLOT * at + START], slots[SLOT * at + STOP] = start, stop
        slots[SLOT * at + OWNER], slots[SLOT * at + STATE] = me(), OPEN
        head[ISSUED] = serial + 1  # from here on the rows are nobody's to read
        return Reservation(start, stop, serial)

    def is_mine(self, reservation: Reservation) -> bool:
        """Whether it is in progress, and of this process."""
        at = SLOT * (reservation.serial % NUM_SLOTS)
        return reservation.serial >= self._head[SETTLED] and self._slots[at + OWNER] == me()

    def close(self, reservation: Reservation, *, publish: bool) -> None:
        """Publish what was reserved, or abandon it."""
        self._slots[SLOT * (reservation.serial % NUM_SLOTS) + STATE] = DONE if publish else ABANDONED

    def release_slot(self, reservation: Reservation) -> None:
        """Release the slot of its owner, before anyone else can come by the slot."""
        self._lock.release_slot(reservation.serial % NUM_SLOTS)

    def settle(self, add_gap: Callable[[int, int], None]) -> None:
        """Move on over reservations that are closed, or whose owner is dead; what holds nothing becomes a gap."""
        head, slots = self._head, self._slots
        while head[SETTLED] < head[ISSUED]:
            at = head[SETTLED] % NUM_SLOTS
            start, stop, state, owner = slots[SLOT * at : SLOT * (at + 1)]
            if state == OPEN and (owner == me() or self._lock.is_slot_held(at)):
                return
            if state != DONE:
                add_gap(start, stop)
            head[PUBLISHED] = stop
            head[SETTLED] += 1

    def must_wait(self) -> bool:
        """Whether the first one in progress is open, and of somebody who is seen to live. For use at any time."""
        at = self._head[SETTLED] % NUM_SLOTS
        return self._slots[SLOT * at + STATE] == OPEN and (
            self._slots[SLOT * at + OWNER] == me() or self._lock.is_known_held(at)
        )

    def abandon_open(self) -> None:
        """Abandon all that are open: nobody will publish into a copy of the memory."""
        for serial in range(self._head[SETTLED], self._head[ISSUED]):
            at = SLOT * (serial % NUM_SLOTS) + STATE
            self._slots[at] = DONE if self._slots[at] == DONE else ABANDONED

    def begin_at(self, end: int) -> None:
        """Go on behind a position, up to which all is published. For use where none is in progress."""
        head = self._head
        self.array()[head[ISSUED] % NUM_SLOTS] = end, end, DONE, me()
        head[PUBLISHED] = end  # as the end of that reservation says
        head[ISSUED] += 1
        head[SETTLED] += 1

    def why_not_mine(self, reservation: Reservation) -> str:
        """What became of a reservation that this process cannot publish, as a message."""
        rows = f"publish: the {reservation.stop - reservation.start} rows from position {reservation.start} are lost: "
        if reservation.serial >= self._head[SETTLED]:
            return rows + "another process reserved them, which this one was forked from. Reserve rows of its own here."
        return rows + (
            "another process gave them up, since nobody held the lock that says that this process lives. The system "
            "drops it when this process closes any descriptor of the buffer's lock file: when it copies its folder, "
            "say. Write them again; copy the folder from another process, or use dumps()."
        )

    def in_progress(self) -> str:
        """The first one that is not published yet, as a phrase."""
        at = self._head[SETTLED] % NUM_SLOTS
        start, stop, _, owner = self._slots[SLOT * at : SLOT * (at + 1)]
        whose = "this process" if owner == me() else "another process"
        return f"a reservation of {stop - start} rows by {whose} is not published yet"


NO_GAPS = np.zeros((0, 2), np.int64)


class Gaps:
    """A ring of the newest gaps, in the memory of a ledger.

    Each is committed by one store of an int64, as all of the ledger is. They are changed under its lock.

    Args:
        head: header of the ledger.
        numbers: of the gaps.

    Attributes:
        array: the numbers, int64 ``[NUM_GAPS, GAP]``.
    """

    def __init__(self, head: memoryview, numbers: memoryview) -> None:
        self._head, self._numbers = head, numbers
        self.array: NDArray[np.int64] = np.frombuffer(numbers, np.int64).reshape(-1, GAP)

    @property
    def num_lost(self) -> int:
        """Positions in all gaps so far."""
        gaps = self._head[GAPS]
        return self._numbers[GAP * ((gaps - 1) % NUM_GAPS) + LOST] if gaps else 0

    def within(self, low: int, high: int) -> NDArray[np.int64]:
        """What lies between two positions: ``[k, 2]``, ascending, apart from one another."""
        head = self._head
        gaps = self.array[np.arange(head[OLDEST_GAP], head[GAPS]) % NUM_GAPS, :2]
        gaps = np.clip(gaps, low, high)
        gaps = gaps[gaps[:, 1] > gaps[:, 0]]
        gaps = gaps[np.argsort(gaps[:, 0], kind="stable")]
        if len(gaps) < 2:
            return gaps
        reached = np.maximum.accumulate(gaps[:, 1])
        first = np.append(True, gaps[1:, 0] > reached[:-1])  # a writer killed while it abandoned leaves a gap twice
        return np.stack([gaps[first, 0], np.maximum.reduceat(gaps[:, 1], np.flatnonzero(first))], 1)

    def holds(self, position: int) -> bool:
        """Whether a position is in a gap, of those that are remembered."""
        gaps = self.array[np.arange(self._head[OLDEST_GAP], self._head[GAPS]) % NUM_GAPS]
        return bool(((gaps[:, 0] <= position) & (position < gaps[:, 1])).any())

    def add(self, start: int, stop: int, low: int) -> None:
        """Note a gap.

        Args:
            start: first position.
            stop: the one behind the last.
            low: position before which gaps are forgotten.
        """
        if stop <= start:
            return
        head, gaps, lost = self._head, self._numbers, self.num_lost
        while head[OLDEST_GAP] < head[GAPS] and gaps[GAP * (head[OLDEST_GAP] % NUM_GAPS) + STOP] <= low:
            head[OLDEST_GAP] += 1
        if head[GAPS] > head[OLDEST_GAP]:
            last = GAP * ((head[GAPS] - 1) % NUM_GAPS)
            if gaps[last] <= start and stop <= gaps[last + STOP]:
                return  # a writer killed between two stores had noted it already
            if gaps[last + STOP] == start:
                gaps[last + STOP], gaps[last + LOST] = stop, lost + stop - start
                return
            if head[GAPS] - head[OLDEST_GAP] == NUM_GAPS:  # more than are remembered: what lies between is lost too
                gaps[last] = min(start, gaps[last])
                gaps[last + STOP], gaps[last + LOST] = max(stop, gaps[last + STOP]), lost + stop - start
                return
        at = GAP * (head[GAPS] % NUM_GAPS)
        gaps[at], gaps[at + STOP], gaps[at + LOST] = start, stop, lost + stop - start
        head[GAPS] += 1

    def begin(self, num_lost: int) -> None:
        """Forget all gaps, apart from the number of positions in them."""
        head = self._head
        head[OLDEST_GAP] = head[GAPS] = 0
        self.array[:] = 0
        if num_lost > 0:  # a gap that nobody reads any more keeps the count
            self._numbers[LOST], head[GAPS], head[OLDEST_GAP] = num_lost, 1, 1


_AHEAD_BYTES, _LEAST_BYTES = 16 << 20, 1 << 16
_TAKEN, _DEVICE, _INODE = range(3)


class Space:
    """Takes space for rows in the order in which a ring writes them, a piece ahead of the writer.

    A file is as long as all its rows, and sparse: bytes take space when they are written. Through a memory map, a
    write that finds the disk full ends the process by a signal. So space is taken first, where a full disk is an
    error::

        rows that anyone has reserved  <=  rows that have space

    Each piece is as large as all before, up to 16 MiB, so most reservations cost a comparison.

    Args:
        file: with the rows.
        numbers: :attr:`num_bytes` bytes of the file, as int64: shared by all who write it, and changed under their
            lock.

    Attributes:
        num_bytes: of ``numbers``.
    """

    num_bytes = 24

    def __init__(self, file: Segment, numbers: memoryview) -> None:
        self._file, self._numbers = file, numbers
        self._columns: list[tuple[int, int]] = []  # first byte, and bytes of a row, of each entry
        self._capacity = self._row_bytes = 0

    def is_of_this_file(self) -> bool:
        """Whether the numbers were written for this file: a copy of it may be sparse where the original was not."""
        return self.is_counted_for(self._file, bytes(self._numbers))

    @staticmethod
    def is_counted_for(file: Segment, numbers: bytes) -> bool:
        """Whether these numbers, read from a file, were written for it."""
        status = os.fstat(file.fd)
        read = memoryview(numbers).cast("q")
        return (read[_DEVICE], read[_INODE]) == (_int64(status.st_dev), _int64(status.st_ino))

    def begin(self) -> None:
        """Count from 0 on. For use under the lock."""
        status = os.fstat(self._file.fd)
        self._numbers[_TAKEN] = 0
        self._numbers[_DEVICE], self._numbers[_INODE] = _int64(status.st_dev), _int64(status.st_ino)

    def lay_out(self, layout: Layout[Any], capacity: int) -> None:
        """Say where entries lie in the file, ``[capacity, ...]`` each."""
        self._columns = [(field.start, field.num_bytes // capacity) for field in layout.fields if field.num_bytes]
        self._capacity, self._row_bytes = capacity, sum(row_bytes for _, row_bytes in self._columns)

    def make_for(self, end: int) -> None:
        """Have space for the rows of all positions below ``end``. For use under the lock.

        Raises:
            OSError: the disk, or memory, is full; nothing has changed.
        """
        taken = self._numbers[_TAKEN]
        if end > taken < self._capacity:
            self._take(max(0, taken), min(end, self._capacity))

    def _take(self, taken: int, needed: int) -> None:
        ahead = min(_AHEAD_BYTES, max(_LEAST_BYTES, taken * self._row_bytes))
        if ahead < self._num_bytes_free() // 4:  # else leave what is there to whoever needs it now
            upto = min(self._capacity, needed + ahead // max(1, self._row_bytes))
            with contextlib.suppress(OSError):
                self._take_rows(taken, upto)
                return
        self._take_rows(taken, needed)

    def _take_rows(self, first: int, upto: int) -> None:
        for start, row_bytes in self._columns:
            try:
                self._file.allocate(start + first * row_bytes, (upto - first) * row_bytes)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{os.strerror(error.errno or 0)}: rows {first} to {upto} of a replay buffer need "
                    f"{(upto - first) * self._row_bytes} bytes. Nothing of them was written. Free space, or make the "
                    "storage smaller",
                    self._file.name,
                ) from error
        self._numbers[_TAKEN] = upto

    def _num_bytes_free(self) -> int:
        found = os.fstatvfs(self._file.fd)
        return found.f_bavail * found.f_frsize if found.f_blocks else 1 << 62  # memory without a limit says 0


def _int64(number: int) -> int:
    return number & (1 << 63) - 1


_COUNTERS = dict(
    zip(
        ("capacity", "issued", "settled", "published", "base", "revision", "gaps", "oldest_gap", "ids"),
        range(9),
        strict=True,
    ),
    skipped=SKIPPED,
    uncounted=UNCOUNTED,
    passed=PASSED,
)

Numbers = NDArray[np.int64]


def wrong_in(ledger: Ledger, capacity: int | None) -> str:
    """What is wrong with a ledger's numbers, as a phrase; empty where nothing is. For use while writing.

    Each number is compared with others that say the same, so that rows which were never written are not taken for
    published ones. What a process leaves that was killed between two stores passes.

    Args:
        ledger: of a file that was opened.
        capacity: rows, as the description of the rows says; None: there is none, and so there are no rows.
    """
    head, slots, gaps = ledger.numbers()
    counters = {name: int(head[at]) for name, at in _COUNTERS.items()}
    for name, value in counters.items():
        if value < 0:
            return f"the counter {name!r} is {value}"
    if ledger.num_lost < 0:
        held_nothing = ledger.num_lost + counters["passed"]
        return f"{counters['passed']} positions were passed over, and {held_nothing} hold nothing"
    if capacity is None:
        used = [name for name in ("issued", "settled", "published", "gaps", "skipped") if counters[name]]
        return f"there are no rows, and the counter {used[0]!r} is {counters[used[0]]}" if used else ""
    if counters["capacity"] != capacity:
        return f"the counter 'capacity' is {counters['capacity']}, expected {capacity}"
    return (
        _wrong_in_slots(counters, slots)
        or _wrong_in_base(counters["base"], ~int(head[BASE_CHECK]), ledger.end())
        or _wrong_in_gaps(counters, gaps, ledger.end())
    )


def _wrong_in_slots(counters: dict[str, int], slots: Numbers) -> str:
    """Reservations follow one another, and those in progress begin where the published positions end."""
    settled, published = counters["settled"], counters["published"]
    in_progress = counters["issued"] - settled
    if not 0 <= in_progress <= NUM_SLOTS:
        return f"{counters['issued']} reservations were made, and {settled} of them ended"
    last = (settled - 1, settled)  # one may end just now
    ends = [int(slots[serial % NUM_SLOTS][STOP]) for serial in last]
    if in_progress < NUM_SLOTS and published not in ends:
        return f"{published} positions are published, and the last reservation ended at {ends[0]}"
    at = published
    for serial in range(settled, settled + in_progress):
        start, stop, state, owner = slots[serial % NUM_SLOTS].tolist()
        ends_now = serial == settled and start < stop == published
        follows = (start == at or ends_now) and start <= stop <= published + counters["capacity"]
        if not follows or not OPEN <= state <= ABANDONED or owner < 0:
            return f"a reservation in progress is of positions {start} to {stop} in state {state}, after {at}"
        at = stop
    return ""


def _wrong_in_base(base: int, check: int, end: int) -> str:
    if base == check or (base == 0 and check == -1):  # never set
        return ""
    if 0 <= base <= end and 0 <= check <= end:  # a process was killed between the two
        return ""
    return f"the counter 'base' is {base}, and its copy {check}, with {end} positions"


def _wrong_in_gaps(counters: dict[str, int], gaps: Numbers, end: int) -> str:
    """Gaps lie among the positions, and no count of lost positions grows by more than the gap is wide."""
    oldest, newest = counters["oldest_gap"], counters["gaps"]
    if not 0 <= newest - oldest <= NUM_GAPS:
        return f"the gaps {oldest} to {newest} are more than {NUM_GAPS}"
    serials = np.arange(max(0, newest - NUM_GAPS), newest)
    start, stop, lost, _ = gaps[serials % NUM_GAPS].T
    known = serials >= oldest
    wrong = known & ((start < 0) | (stop < start) | (stop > end))
    if newest:
        before = np.concatenate([lost[:1] if newest > NUM_GAPS else np.zeros(1, np.int64), lost[:-1]])
        wrong |= (lost < before) | (known & (lost - before > stop - start))
        wrong |= ~known & (stop > start) & (stop > end - counters["capacity"])  # it is not over yet
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        return f"a gap is of positions {start[at]} to {stop[at]} of {end}, with {lost[at]} lost until then"
    next_start, next_stop, next_lost, _ = gaps[newest % NUM_GAPS].tolist()
    total = int(lost[-1]) if newest else 0
    is_new = next_lost > total and next_start < next_stop <= counters["published"]
    if newest - oldest < NUM_GAPS and is_new:
        return f"there are {newest} gaps, and another one of positions {next_start} to {next_stop}"
    return ""
