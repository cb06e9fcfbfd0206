"""Callbacks in forked children, where locks and threads are reset, and at the end of this process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from multiprocessing import util
from typing import Any, Protocol, TypeVar

_WAIT_S = 5.0  # of a fork, for all locks together


class Forked(Protocol):
    """An object that is reset in forked children."""

    def reset_after_fork(self) -> None:
        """In a forked child: make new locks, and reset what depended on other threads. It must not wait."""


T = TypeVar("T", bound=Forked)


_owners: weakref.WeakKeyDictionary[Forked, Callable[[Any], Any]] = weakref.WeakKeyDictionary()  # and what has a lock


def _now() -> list[tuple[Forked, Callable[[Any], Any]]]:
    """All owners that live, and what returns the lock of each; other threads may add some meanwhile."""
    owners = [ref() for ref in _owners.keyrefs()]  # a copy, made in one step: items() would notice the change
    found = [(owner, _owners.get(owner)) for owner in owners if owner is not None]
    return [(owner, lock_of) for owner, lock_of in found if lock_of is not None]


def _no_lock(owner: Forked) -> None:
    """For owners whose state may be half changed at a fork."""


class _HeldLocks(threading.local):
    """Locks that this thread holds while it forks."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _HeldLocks()


def on_fork(owner: T, lock_of: Callable[[T], Any] | None = None) -> None:
    """Call ``owner.reset_after_fork()`` in each child that this process forks, as long as ``owner`` lives.

    A lock that another thread held at the fork is held in the child for ever, since that thread is not there; what it
    guards may be half changed. Where a state has to be whole in the child, ``lock_of`` returns the lock that guards
    it: a fork waits until it is free, for a few seconds at most.

    Args:
        owner: an object with a weak reference.
        lock_of: takes the owner; an ``RLock``.

    Example:
        >>> class Counter:
        ...     def __init__(self):
        ...         self.reset_after_fork()
        ...         on_fork(self)
        ...     def reset_after_fork(self):
        ...         self.lock = threading.Lock()
        >>> counter = Counter()
        >>> _ = counter.lock.acquire()
        >>> pid = os.fork()
        >>> if not pid:
        ...     os._exit(int(counter.lock.locked()))
        >>> os.waitpid(pid, 0)[1]
        0
    """
    _owners[owner] = lock_of or _no_lock


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
    for owner, lock_of in _now():
        lock = lock_of(owner)
        if lock is not None and lock.acquire(timeout=max(0.0, until - time.monotonic())):
            _held.locks.append(lock)


def _in_parent() -> None:
    while _held.locks:
        _held.locks.pop().release()


def _in_child() -> None:
    _held.locks.clear()
    failed: list[Exception] = []
    for owner, _ in _now():
        try:
            owner.reset_after_fork()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]  # which Python prints


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


_Function = Callable[[], None]

_BEFORE_ALL_OTHERS = 1000  # of what multiprocessing does at exit


class ExitStage(IntEnum):
    """Order of calls at exit: threads use processes, and profilers watch threads."""

    PROFILERS = 0
    THREADS = 1
    PROCESSES = 2


_functions: dict[_Function, ExitStage] = {}
_registered = False  # with atexit, by this process or by one that it was forked from
_finalizer: Any = None


def call_at_exit(function: _Function, stage: ExitStage) -> None:
    """Call a function when this process ends; of one that is given twice, the second time counts for nothing.

    Children of :mod:`multiprocessing` end without :mod:`atexit`, and wait for their own children before: there it is
    called by a finalizer of :mod:`multiprocessing`. A forked process begins with nothing to call.
    """
    global _registered, _finalizer
    _functions[function] = stage
    if multiprocessing.parent_process() is None:
        if not _registered:
            _registered = True
            atexit.register(_call_all)
    elif _finalizer is None or not _finalizer.still_active():  # a forked child has dropped its parent's finalizers
        _finalizer = util.Finalize(None, _call_all, exitpriority=_BEFORE_ALL_OTHERS)


def cancel_at_exit(function: _Function) -> None:
    """Do not call a function when this process ends, after all."""
    _functions.pop(function, None)


def rest_if_ending() -> None:
    """Where something has failed: return, but in a daemon thread of a process that ends, wait for its end.

    There, what the thread uses was ended, so that it fails. Python ends such threads in the middle of what they do, a
    moment later. The caller holds no lock.
    """
    thread = threading.current_thread()
    if _ending is not None and thread is not _ending and thread.daemon:
        threading.Event().wait()


_ending: threading.Thread | None = None  # which makes the calls at exit


def _call_all() -> None:
    global _ending
    _ending = threading.current_thread()
    with ExitStack() as stack:  # which calls the rest, too, if one raises
        for function in sorted(_functions, key=lambda function: _functions[function], reverse=True):
            stack.callback(function)


def _begin_fork() -> None:
    global _finalizer, _ending
    _finalizer = _ending = None
    _functions.clear()


os.register_at_fork(after_in_child=_begin_fork)
