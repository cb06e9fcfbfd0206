"""Allocator: how much memory there is, and what the C library does with what was freed."""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_MOST_MAPPED = 32 * 2**20  # some versions take no more


def keep_freed_memory(most_bytes: int = 256 * 2**20) -> bool:
    """Have this process keep memory that it frees, and use it again.

    By default it goes back to the system as soon as a few hundred KiB are free, and large allocations always do. Then
    each page costs a fault, and is cleared, whenever it is written for the first time: for a megabyte, more than
    copying it. For processes that are our own, and allocate large memory again and again.

    Args:
        most_bytes: free memory that stays with the process.

    Returns:
        Whether the C library can: that of GNU can.

    Example:
        >>> keep_freed_memory() in (True, False)
        True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, another system
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_TRIM_THRESHOLD, most_bytes)) and bool(mallopt(_MMAP_THRESHOLD, _MOST_MAPPED))


def check_fits(num_bytes: int) -> None:
    """Refuse a batch that the memory of this machine cannot hold: systems promise more than they have.

    Raises:
        MemoryError: it cannot.
    """
    total = _total_bytes()
    if total is not None and num_bytes > total:
        raise MemoryError(
            f"frames_per_batch: a batch takes {num_bytes / 1e9:,.1f} GB, and this machine has {total / 1e9:,.1f} GB of "
            "memory. Collect fewer frames a batch; a ReplayBuffer with a LazyMemmapStorage keeps many of them."
        )


@functools.cache
def _total_bytes() -> int | None:
    """Memory of this machine; None: the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
