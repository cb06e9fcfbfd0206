"""Memory that several processes map; layouts of typed arrays in it, tensors over them, and its free ranges."""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Hashable, Iterable
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from rollwright._files import unnamed_file

_BLOCK = 4096
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)


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
            _fd = unnamed_file(on_disk) if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.fd = _fd
        self.close = weakref.finalize(self, os.close, _fd)  # memory stays mapped while views of it live

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self.fd).st_size

    @property
    def name(self) -> str:
        """What to call the file in messages."""
        if self.path is not None:
            return str(self.path)
        try:
            return os.readlink(f"/proc/self/fd/{self.fd}")  # names the folder that it is in, if any
        except OSError:
            return "(memory that processes share)"

    def grow(self, num_bytes: int) -> None:
        """Make the file at least so long; new bytes are zero and take no room until they are written.

        Raises:
            OSError: the system does not let a file be so long.
        """
        if self.num_bytes < num_bytes:
            try:
                os.ftruncate(self.fd, num_bytes)
            except OSError as error:
                raise _failed(error, f"a file of {num_bytes} bytes cannot be made", self.name) from error

    def allocate(self, start: int, num_bytes: int) -> None:
        """Take room for bytes, so that writing them cannot fail; what they hold stays.

        Makes the file longer if need be. Nobody may write these bytes at the same time. On file systems that copy on
        write (btrfs, zfs), writing may fail all the same.

        Raises:
            OSError: the disk, or memory, is full.
        """
        if num_bytes <= 0:
            return
        try:
            self._allocate(start, num_bytes)
        except OSError as error:
            raise _failed(error, f"{num_bytes} bytes cannot be allocated", self.name) from error

    def _allocate(self, start: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.fd, start, num_bytes)
                return
            except OSError as error:
                if error.errno not in _NO_FALLOCATE:
                    raise
        if self.num_bytes < start + num_bytes:
            os.ftruncate(self.fd, start + num_bytes)
        for at in {*range(start, start + num_bytes, _BLOCK), start + num_bytes - 1}:  # writing a block allocates it
            os.pwrite(self.fd, os.pread(self.fd, 1, at), at)

    def map(self, start: int, num_bytes: int) -> memoryview:
        """The bytes from ``start``, writable, shared with all who map them; valid as long as the view lives.

        ``start`` may be any multiple of 8 inside the file.
        """
        if not num_bytes:
            return memoryview(b"")
        page = start - start % mmap.ALLOCATIONGRANULARITY
        return memoryview(_mapped(self.fd, page, start - page + num_bytes))[start - page :]

    def flush_to_disk(self) -> None:
        """Wait until the disk has the file; what a killed process wrote is safe without it, a power cut needs it."""
        os.fsync(self.fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.path, DupFd(self.fd) if self.path is None else None))


def _mapped(fd: int, start: int, num_bytes: int) -> mmap.mmap:
    """Bytes of a file, without the descriptor that ``mmap.mmap(fd)`` keeps open for each mapping."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, num_bytes, access=mmap.ACCESS_WRITE, offset=start, trackfd=False)
    if start + num_bytes > (size := os.fstat(fd).st_size):
        raise ValueError(f"bytes {start} to {start + num_bytes} of a file of {size} bytes cannot be mapped")
    mapped = mmap.mmap(-1, num_bytes)  # the file takes the place of this memory, and goes when it goes
    place = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap(place, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, start) != place:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {num_bytes} bytes of a file cannot be mapped")
    return mapped


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_MAP_FIXED = 0x10


def _failed(error: OSError, what: str, name: str) -> OSError:
    return OSError(error.errno, f"{os.strerror(error.errno or 0)}: {what}", name)


def _reopened(path: Path | None, duplicate: Any) -> Segment:
    return Segment(path, _fd=None if duplicate is None else duplicate.detach())


def fence() -> None:
    """Keep loads and stores before this call before those after it, for all processes that see the memory."""
    # Stores and loads before a release stay before it, those after an acquire stay after it, and these two keep their
    # order; x86 needs no such thing, other processors do. A new lock each time: no interrupt can leave it half done.
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


ALIGNMENT = 64  # bytes: a cache line, so that no two arrays share one

K = TypeVar("K", bound=Hashable)


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of ``alignment``."""
    return -(-num_bytes // alignment) * alignment


@functools.cache
def in_numpy(dtype: torch.dtype) -> bool:
    """Whether NumPy has the dtype (it has no bfloat16, for one)."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return False
    return True


class Field(NamedTuple, Generic[K]):
    """One array.

    Attributes:
        key: its name.
        shape: of the array.
        dtype: of its elements.
        start: its first byte.
    """

    key: K
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The byte behind its last one."""
        return self.start + self.num_bytes

    def tensor(self, memory: memoryview, origin: int = 0) -> torch.Tensor:
        """The array as a tensor, which keeps ``memory`` alive (a tensor of no elements has memory of its own).

        Args:
            memory: in which it lies.
            origin: the byte, counted as :attr:`start` is, at which ``memory`` begins.
        """
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.start - origin).view(self.shape)


class Layout(NamedTuple, Generic[K]):
    """Arrays one behind the other.

    Equal layouts are equal tuples; a layout can be pickled and hashed.

    Attributes:
        fields: the arrays, in order.
        end: the first free byte behind them, aligned.

    Example:
        >>> layout = Layout.of([("a", (2, 3), torch.float32), ("b", (2,), torch.bool)])
        >>> [field.start for field in layout.fields], layout.end
        ([0, 64], 128)
        >>> layout.tensors(memoryview(bytearray(layout.end)))["b"]
        tensor([False, False])
    """

    fields: tuple[Field[K], ...]
    end: int

    @classmethod
    def of(
        cls, entries: Iterable[tuple[K, tuple[int, ...], torch.dtype]], start: int = 0, alignment: int = ALIGNMENT
    ) -> Self:
        """The layout of arrays given by key, shape and dtype.

        Args:
            entries: the arrays.
            start: the first free byte.
            alignment: each array starts at a multiple of it.
        """
        fields, end = [], aligned(start, alignment)
        for key, shape, dtype in entries:
            field = Field(key, tuple(shape), dtype, end)
            fields.append(field)
            end = aligned(field.stop, alignment)
        return cls(tuple(fields), end)

    @property
    def start(self) -> int:
        """The first byte of the arrays."""
        return self.fields[0].start if self.fields else self.end

    @property
    def stop(self) -> int:
        """The byte behind the last one of the arrays, which :attr:`end` rounds up."""
        return self.fields[-1].stop if self.fields else self.end

    def map(self, segment: Segment) -> dict[K, torch.Tensor]:
        """The arrays as tensors over a segment, which is long enough for them."""
        return self.tensors(segment.map(self.start, self.stop - self.start), self.start)

    def tensors(self, memory: memoryview, origin: int = 0) -> dict[K, torch.Tensor]:
        """The arrays as tensors; see :meth:`Field.tensor`."""
        return {field.key: field.tensor(memory, origin) for field in self.fields}


class FreeList:
    """Allocates stretches of a memory that grows, and takes them back.

    Attributes:
        end: all behind it is free.

    Example:
        >>> memory = FreeList()
        >>> first, second, third = (memory.allocate(100) for _ in range(3))
        >>> first, second, third, memory.end
        (0, 128, 256, 384)
        >>> memory.release(first, 100), memory.release(second, 100)
        (None, None)
        >>> memory.allocate(200), memory.end
        (0, 384)
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # first byte and size, in order, none beside another

    def allocate(self, num_bytes: int) -> int:
        """The first byte of a stretch that was free."""
        size = aligned(num_bytes)
        for i, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(start + size, room - size)] if room > size else []
                return start
        start, self.end = self.end, self.end + size
        return start

    def release(self, start: int, num_bytes: int) -> None:
        """Make a stretch that was allocated free again."""
        joined: list[tuple[int, int]] = []
        for first, size in sorted([*self._free, (start, aligned(num_bytes))]):
            if joined and sum(joined[-1]) == first:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            elif size:
                joined.append((first, size))
        if joined and sum(joined[-1]) == self.end:
            self.end = joined.pop()[0]
        self._free = joined
