"""Processes, threads, descriptors and shared memory that a program has, and what is left of them; from /proc."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

__all__ = ["Resources"]

_SERVERS = ("forkserver", "_processes.start.server", "resource_tracker")  # which start workers, and stay


class Resources(NamedTuple):
    """What this program has now.

    Attributes:
        processes: that descend from it, by number: their command lines.
        threads: of it, by number: their names.
        descriptors: how many, by kind.
        mappings: pieces of memory that it shares with others.
        files: in ``/dev/shm``.
        stays: parts of command lines of processes that do not count.
    """

    processes: dict[int, str]
    threads: dict[int, str]
    descriptors: Counter[str]
    mappings: int
    files: frozenset[str]
    stays: tuple[str, ...]

    @classmethod
    def now(cls, stays: Sequence[str] = ()) -> Self:
        """Look."""
        gc.collect()
        ignored = (*_SERVERS, *stays)
        processes = {pid: line for pid, line in _descendants().items() if not any(part in line for part in ignored)}
        threads = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.split()[1].endswith("s")]
        files = frozenset(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else frozenset()
        return cls(processes, threads, _descriptors(), len(shared), files, tuple(stays))

    @classmethod
    def left_since(cls, before: Self, gone_s: float) -> list[str]:
        """What is there that was not there before, as phrases; ``gone_s``: seconds for it to go."""
        until = time.monotonic() + gone_s
        while (left := cls.now(before.stays).beside(before)) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def beside(self, before: Self) -> list[str]:
        """What is there and was not there before, as phrases."""
        found = [f"process {pid} ({line})" for pid, line in self.processes.items() if pid not in before.processes]
        found += [f"thread {name}" for ident, name in self.threads.items() if ident not in before.threads]
        more = self.descriptors - before.descriptors
        if more.total() > (before.descriptors - self.descriptors).total():
            found.append(f"descriptors: {dict(more)}")
        if self.mappings > before.mappings:
            found.append(f"{self.mappings - before.mappings} shared mappings")
        new = self.files - before.files
        if new:  # of the whole machine
            ours = {os.getpid(), *_descendants()}
            others = _mapped(lambda pid: pid not in ours)
            mine = _mapped(lambda pid: pid in ours)
            unused = {name for name in new - others if not name.startswith("sem.")}  # which nobody need map
            found += [f"/dev/shm/{name}" for name in sorted(unused | (new & mine))]
        return found


def _descendants() -> dict[int, str]:
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry))
    found: dict[int, str] = {}
    level = [os.getpid()]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        found.update((pid, _command(pid)) for pid in level)
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return ""


def _descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kinds[os.readlink(f"/proc/self/fd/{entry}").partition(":[")[0]] += 1
    return kinds


def _mapped(meant: Callable[[int], bool]) -> set[str]:
    """Names in /dev/shm that some processes map."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        if meant(int(entry)):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{entry}/maps").read_text().splitlines()
                found |= {line.rpartition("/dev/shm/")[2].partition("/")[0] for line in lines if "/dev/shm/" in line}
    return found
