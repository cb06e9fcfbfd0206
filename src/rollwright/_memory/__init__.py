"""Raw memory: layouts of typed arrays, borrowed memory, and its sources (this process, a shared segment)."""

from rollwright._memory.pool import Borrowed, EntryMemory, MemoryPool, check_fits, keep_freed_memory
from rollwright._memory.segment import ALIGNMENT, Field, FreeList, Layout, Segment, aligned, fence, in_numpy

__all__ = [
    "ALIGNMENT",
    "Borrowed",
    "EntryMemory",
    "Field",
    "FreeList",
    "Layout",
    "MemoryPool",
    "Segment",
    "aligned",
    "check_fits",
    "fence",
    "in_numpy",
    "keep_freed_memory",
]
