"""Raw memory: layouts of typed arrays, borrowed memory, and its sources (this process, a shared segment)."""

from rollwright._memory.allocator import check_fits, keep_freed_memory
from rollwright._memory.free_list import FreeList
from rollwright._memory.layout import ALIGNMENT, Field, Layout, aligned, in_numpy
from rollwright._memory.loan import Loan
from rollwright._memory.pool import EntryMemory, MemoryPool
from rollwright._memory.segment import Segment

__all__ = [
    "ALIGNMENT",
    "EntryMemory",
    "Field",
    "FreeList",
    "Layout",
    "Loan",
    "MemoryPool",
    "Segment",
    "aligned",
    "check_fits",
    "in_numpy",
    "keep_freed_memory",
]
