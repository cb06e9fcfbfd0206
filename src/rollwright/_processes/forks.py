"""Callbacks in forked children: locks and threads of the parent are reset there."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

__all__ = ["not_here", "on_fork"]

T = TypeVar("T")
_WAIT_S = 5.0  # of a fork, for all locks together


class _Reaction(NamedTuple):
    reset: Callable[[Any], None]
    lock_of: Callable[[Any], Any] | None


_reactions: weakref.WeakKeyDictionary[Any, _Reaction] = weakref.WeakKeyDictionary()


def _now() -> list[tuple[Any, _Reaction]]:
    """All owners that live, and their reactions; other threads may add some meanwhile."""
    owners = [ref() for ref in _reactions.keyrefs()]  # a copy, made in one step: items() would notice the change
    found = [(owner, _reactions.get(owner)) for owner in owners if owner is not None]
    return [(owner, reaction) for owner, reaction in found if reaction is not None]


class _HeldLocks(threading.local):
    """Locks that this thread holds while it forks."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _HeldLocks()


def on_fork(owner: T, reset: Callable[[T], None], lock_of: Callable[[T], Any] | None = None) -> None:
    """Call ``reset(owner)`` in each child that this process forks, as long as ``owner`` lives.

    A lock that another thread held at the fork is held in the child for ever, since that thread is not there; what it
    guards may be half changed. So ``reset`` makes new locks, and resets what depended on other threads. Where a state
    has to be whole in the child, ``lock_of`` returns the lock that guards it: a fork waits until it is free, for a
    few seconds at most.

    Args:
        owner: an object with a weak reference.
        reset: takes the owner; refers to it in no other way. It must not wait.
        lock_of: takes the owner; an ``RLock``.

    Example:
        >>> class Counter:
        ...     def __init__(self):
        ...         self._begin()
        ...         on_fork(self, Counter._begin)
        ...     def _begin(self):
        ...         self.lock = threading.Lock()
        >>> counter = Counter()
        >>> _ = counter.lock.acquire()
        >>> pid = os.fork()
        >>> if not pid:
        ...     os._exit(int(counter.lock.locked()))
        >>> os.waitpid(pid, 0)[1]
        0
    """
    _reactions[owner] = _Reaction(reset, lock_of)


def not_here(name: str, pid: int) -> RuntimeError:
    """The error over something whose threads or processes a forked child does not have.

    Args:
        name: of what is used.
        pid: of the process that made it.
    """
    return RuntimeError(
        f"{name} belongs to process {pid}, which this one was forked from: its threads and workers are there. Use it "
        "there, or make another one here."
    )


def _before() -> None:
    until = time.monotonic() + _WAIT_S
    for owner, (_, lock_of) in _now():
        if lock_of is not None:
            lock = lock_of(owner)
            if lock.acquire(timeout=max(0.0, until - time.monotonic())):
                _held.locks.append(lock)


def _in_parent() -> None:
    while _held.locks:
        _held.locks.pop().release()


def _in_child() -> None:
    _held.locks.clear()
    failed: list[Exception] = []
    for owner, (reset, _) in _now():
        try:
            reset(owner)
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]  # which Python prints


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
