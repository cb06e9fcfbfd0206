"""Runs a function in a forked child, as programs do that fork by themselves; and a server of multiprocessing's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

__all__ = ["SERVED", "forked", "resting_fork"]

T = TypeVar("T")
SERVED = multiprocessing.get_context("forkserver")  # what processes begin with is imported once
SERVED.set_forkserver_preload(["hypothesis", "pytest", "rollwright._processes.preload", "rollwright.collectors"])
LIMIT_S = 60  # after it, the child is ended by SIGALRM


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        return os.fork()


def forked(do: Callable[[], T]) -> T:
    """What ``do()`` returns in a forked child; fails with its traceback, or if it does not come to an end."""
    reader, writer = os.pipe()
    pid = fork()
    if not pid:
        _serve(do, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != -signal.SIGALRM, f"the child hangs: {answer!r}"
    assert status == 0, f"the child ended with status {status}"
    value, trace = pickle.loads(answer)
    assert trace is None, trace
    return value


def _serve(do: Callable[[], Any], writer: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)
    answer: tuple[Any, str | None]
    try:
        answer = do(), None
    except BaseException:
        answer = None, traceback.format_exc()
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    os._exit(0)


@contextlib.contextmanager
def resting_fork() -> Iterator[int]:
    """The id of a forked child that does nothing as long as the block runs."""
    pid = fork()
    if not pid:
        signal.alarm(10 * LIMIT_S)
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
