"""Functions that run when this process ends, however it was started."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from enum import IntEnum
from multiprocessing import util
from typing import Any

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
