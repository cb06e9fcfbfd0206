"""Reservations: the positions of a ring of rows that are being written, and their owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwright.data.replay_buffers.ledger.identity import me
from rollwright.data.replay_buffers.ledger.layout import (
    ABANDONED,
    DONE,
    ISSUED,
    NUM_SLOTS,
    OPEN,
    OWNER,
    PUBLISHED,
    SETTLED,
    SLOT,
    START,
    STATE,
    STOP,
)
from rollwright.data.replay_buffers.ledger.locks import RowLock


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
