"""Processes, descriptors and memory that a test leaves behind, as /proc tells of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from tests.patience import patient

__all__ = [
    "Left",
    "alive",
    "burn",
    "descendants",
    "gone",
    "heard",
    "in_shared_memory",
    "left_behind",
    "num_fds",
    "open_files",
    "num_shared_mappings",
    "shm_entries",
    "strangers",
    "wait_until",
]

SERVERS = ("forkserver", "_processes.start import main", "resource_tracker")  # these stay for the next collector


class Left(NamedTuple):
    """A process that descends from this one."""

    pid: int
    parent: int
    depth: int
    command: str


def _table() -> dict[int, int]:
    """Parents by process, without those that have ended."""
    parents = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:  # a Path takes longer, and tests look at all of them
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            parents[int(entry)] = int(parent)
    return parents


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(of: int | None = None) -> list[Left]:
    """Children, and theirs, of a process (this one)."""
    parents = _table()
    found, level, depth = [], {os.getpid() if of is None else of}, 0
    while level:
        depth += 1
        level = {pid for pid, parent in parents.items() if parent in level}
        found += [Left(pid, parents[pid], depth, _command(pid)) for pid in sorted(level)]
    return found


def strangers() -> list[Left]:
    """Descendants other than servers, which start workers and stay."""
    return [p for p in descendants() if p.depth > 1 or not any(name in p.command for name in SERVERS)]


def left_behind(limit_s: float = 5.0) -> list[Left]:
    """:func:`strangers` after waiting for them to go."""
    wait_until(lambda: not strangers(), limit_s)
    return strangers()


def alive(pid: int) -> bool:
    """Whether a process runs (or is stopped)."""
    return pid in _table()


def gone(pids: list[int], limit_s: float = 5.0) -> bool:
    """Whether processes end within the limit."""
    return wait_until(lambda: not any(alive(pid) for pid in pids), limit_s)


def open_files() -> set[str]:
    """What each file descriptor of this process stands for: told apart, where numbers are given out again."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def num_fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def num_shared_mappings() -> int:
    """Pieces of memory that this process shares with others."""
    return sum(line.split()[1].endswith("s") for line in Path("/proc/self/maps").read_text().splitlines())


def shm_entries() -> set[str]:
    """Named shared memory and semaphores of all processes."""
    return set(os.listdir("/dev/shm"))


def in_shared_memory(address: int) -> bool:
    """Whether an address lies in memory that this process shares with others."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return rights.endswith("s")
    return False


def wait_until(condition, limit_s: float = 20.0, every_s: float = 0.005) -> bool:
    """Whether ``condition()`` comes true in time; for what no event tells of."""
    until = time.monotonic() + patient(limit_s)
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(every_s)
    return True


def heard(call, *kinds: type[BaseException]) -> BaseException | None:
    """What a call raises, if it is of one of these kinds; None where it returns."""
    try:
        call()
    except kinds as error:
        return error
    return None


def burn(pid: int, kind: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, kind)
    except ProcessLookupError:
        return
