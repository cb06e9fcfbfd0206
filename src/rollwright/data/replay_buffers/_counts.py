"""Counts: the counters of a buffer that its limiter reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Counts(NamedTuple):
    """Counters of a buffer that its limiter reads.

    Attributes:
        write_count: elements written so far, by whatever process.
        num_stored: elements that are there.
        can_draw: whether, once something was written, nothing that may be drawn from is empty.
        is_shared: whether other processes may write.
        max_size: elements that it has room for.
    """

    write_count: Callable[[], int]
    num_stored: Callable[[], int]
    can_draw: Callable[[], bool]
    is_shared: Callable[[], bool]
    max_size: int
