"""Allocator: what the C library does with memory that was freed."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

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
