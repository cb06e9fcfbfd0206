"""FreeList: the free ranges of a memory that grows."""

from __future__ import annotations

from rollwright._memory.layout import aligned


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
