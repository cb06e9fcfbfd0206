"""Trial: makes the collectors of one check, gives it a limit of time, and shuts them down."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector

__all__ = ["TransportSettings", "Trial"]

_END_S = 20.0


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
        self.expired = "".join(traceback.format_stack(_frame_of(self._thread))[-4:])
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


def _frame_of(thread: int) -> Any:
    return sys._current_frames().get(thread)
