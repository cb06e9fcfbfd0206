"""Runs one check: makes its collectors, limits its time, shuts them down, and sees what is left of them."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector

_END_S = 20.0
_SERVERS = ("forkserver", "_processes.start import main", "resource_tracker")  # which start workers, and stay


@dataclass(frozen=True, kw_only=True)
class TransportSettings:
    """The transport under test, and the limits of its checks.

    Attributes:
        backend: its name.
        backend_options: of all collectors.
        num_workers: of most collectors, at least 2.
        limit_s: seconds for a check; what hangs is shut down then, and fails.
        interrupt_s: seconds from a Ctrl-C to the KeyboardInterrupt.
        failure_s: seconds from the death of a worker to the error.
        gone_s: seconds from the end of a collector until nothing of it is left.
        make_buffer: makes a replay buffer that workers of this backend can write to; None: one in shared memory, for
            backends that share memory, and a refusal for others.
        stays: parts of command lines of processes that may stay when a collector was shut down, such as a server that
            starts workers for the next one.
        one_at_a_time: whether a process can have one collector of this backend at a time: the one before is shut down
            when a check makes another.
    """

    backend: str
    backend_options: Mapping[str, Any] | None = None
    num_workers: int = 3
    limit_s: float = 120.0
    interrupt_s: float = 1.0
    failure_s: float = 10.0
    gone_s: float = 5.0
    make_buffer: Callable[[], Any] | None = None
    stays: tuple[str, ...] = ()
    one_at_a_time: bool = False

    def __post_init__(self) -> None:
        if self.num_workers < 2:
            raise ValueError(f"num_workers: expected at least 2, got {self.num_workers}: checks compare workers.")


@dataclass
class Trial:
    """One run of a check.

    Attributes:
        settings: of the transport.
        expired: where the check was at its limit; None: it is within.
    """

    settings: TransportSettings
    expired: str | None = None
    _made: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._timer = threading.Timer(self.settings.limit_s, self._expire)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._timer.join(_END_S)
        for collector in self._made:
            with contextlib.suppress(Exception) if self.expired else contextlib.nullcontext():
                collector.shutdown(raise_on_error=False)
        if self.expired is not None:
            raise AssertionError(
                f"expected the check to end within {self.settings.limit_s:g} s, and it was waiting:\n{self.expired}"
            ) from error

    def _expire(self) -> None:
        """End all collectors, which ends the waits for them."""
        self.expired = "".join(traceback.format_stack(sys._current_frames().get(self._thread))[-4:])
        for collector in self._made:
            with contextlib.suppress(Exception):  # the transport may be broken in any way; the check has failed anyhow
                collector.shutdown(timeout=1.0, raise_on_error=False)

    def collector(self, kind: str, envs: list[Any], policy: Any, *, each: int, **options: Any) -> Any:
        """A collector over the transport.

        Args:
            kind: ``"sync"`` or ``"async"``.
            envs: a factory for each worker.
            policy: of all.
            each: frames of a worker in a batch.
            **options: of the collector.
        """
        while self.settings.one_at_a_time and self._made:
            self._made.pop().shutdown(raise_on_error=False)
        of_kind: Any = MultiSyncCollector if kind == "sync" else MultiAsyncCollector
        options["frames_per_batch"] = each * len(envs) if kind == "sync" else each
        options |= {"backend": self.settings.backend, "backend_options": self.settings.backend_options}
        made = of_kind(envs, policy, **options)
        self._made.append(made)
        return made

    def forget(self, collector: Any) -> None:
        """Hold a collector no longer, which was shut down."""
        if collector in self._made:
            self._made.remove(collector)

    @property
    def num_workers(self) -> int:
        """Of most collectors."""
        return self.settings.num_workers


# What is left, from /proc --------------------------------------------------------------------------


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
