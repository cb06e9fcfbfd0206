"""Space on disk or in memory for the rows of a file, allocated before they are written."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from rollwright._memory import Layout, Segment

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
