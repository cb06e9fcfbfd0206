"""Segment: memory that several processes map, as a file with or without a name."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Self

__all__ = ["Segment"]


class Segment:
    """A file mapped into memory, which grows and never shrinks.

    Without a path it has no name anywhere, and is gone with the last process that has it open, however that process
    ends. Pickling hands it on to a process that is being started (the file descriptor of an unnamed one goes along).

    Args:
        path: where the file lies; None for one without a name.
        on_disk: whether one without a name lies in the folder for temporary files, and not in memory.

    Example:
        >>> segment = Segment()
        >>> segment.grow(8)
        >>> segment.map(0, 8)[:3] = b"abc"
        >>> bytes(segment.map(0, 3))
        b'abc'
    """

    def __init__(self, path: Path | None = None, *, on_disk: bool = False, _fd: int | None = None) -> None:
        self.path = path
        if _fd is None:
            _fd = _unnamed(on_disk) if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.fd = _fd
        self.close = weakref.finalize(self, os.close, _fd)  # memory stays mapped while views of it live

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self.fd).st_size

    def grow(self, num_bytes: int) -> None:
        """Make the file at least so long; new bytes are zero and take no room until they are written."""
        if self.num_bytes < num_bytes:
            os.ftruncate(self.fd, num_bytes)

    def map(self, start: int, num_bytes: int) -> memoryview:
        """The bytes from ``start``, writable, shared with all who map them; valid as long as the view lives.

        ``start`` may be any multiple of 8 inside the file.
        """
        page = start - start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self.fd, start - page + num_bytes, access=mmap.ACCESS_WRITE, offset=page)
        return memoryview(mapped)[start - page :]

    def flush_to_disk(self) -> None:
        """Wait until the disk has the file; what a killed process wrote is safe without it, a power cut needs it."""
        os.fsync(self.fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.path, DupFd(self.fd) if self.path is None else None))

    @classmethod
    def _of(cls, path: Path | None, fd: int | None) -> Self:
        return cls(path, _fd=fd)


def _unnamed(on_disk: bool) -> int:
    if hasattr(os, "memfd_create") and not on_disk:
        return os.memfd_create("rollwright", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="rollwright-") as file:
        return os.dup(file.fileno())


def _reopened(path: Path | None, duplicate: Any) -> Segment:
    return Segment._of(path, None if duplicate is None else duplicate.detach())
