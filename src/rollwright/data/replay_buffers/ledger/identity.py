"""A number that identifies this process in reservations."""

from __future__ import annotations

import os


def _new() -> int:
    return int.from_bytes(os.urandom(7), "little")


_identity = _new()


def _reset() -> None:
    global _identity
    _identity = _new()


os.register_at_fork(after_in_child=_reset)  # where there is one thread: each has the same, from the first use


def me() -> int:
    """A number that no other process has or had."""
    return _identity
