"""Options that batched environments of other libraries have, and that have no effect here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from rollwright._options import refuse_unknown


class IgnoredOptions(TypedDict, total=False):
    """Accepted so that programs written with them run: data goes through shared memory, and is the caller's own."""

    share_individual_td: bool | None
    use_buffers: bool | None
    consolidate: bool
    pin_memory: bool
    shared_memory: bool
    memmap: bool
    policy_proof: Any
    allow_step_when_done: bool
    daemon: bool
    metadata_from_workers: bool
    shutdown_timeout: float | None


def check_ignored(given: Iterable[str], owner: str) -> None:
    """Test the names of what was given.

    Raises:
        TypeError: one is unknown.
    """
    refuse_unknown(given, list(IgnoredOptions.__annotations__), owner)
