"""closed_on_error: a construction that fails leaves no environment open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def closed_on_error(envs: Sequence[Any]) -> Iterator[None]:
    """Close environments if the block raises.

    Args:
        envs: those that were made; may grow in the block.
    """
    try:
        yield
    except BaseException:
        for env in envs:
            with suppress(Exception):  # the error that is under way matters
                env.close(raise_if_closed=False)
        raise
