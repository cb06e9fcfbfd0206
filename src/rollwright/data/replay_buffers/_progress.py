"""ProgressCondition: lets threads wait for others, with a limit on the time without progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rollwright._processes.forks import on_fork

_FIRST_NAP_S, _LONGEST_NAP_S = 0.2e-3, 10e-3
_PREFETCHERS = "rollwright-prefetch"  # threads that draw only what was asked for


class ProgressCondition:
    """A condition on which threads wait until they may go on.

    Those who change something wake them, by :attr:`changed`; what other processes change is noticed within 10 ms.

    Attributes:
        changed: held while what is waited for changes.

    Example:
        >>> progress, drawn = ProgressCondition(), []
        >>> def draw():
        ...     with progress.changed:
        ...         drawn.append(3)
        ...         progress.changed.notify_all()
        >>> timer = threading.Timer(0.01, draw)
        >>> timer.start()
        >>> progress.wait(
        ...     lambda: len(drawn) > 0,
        ...     lambda: len(drawn),
        ...     timeout_s=10.0,
        ...     stop=lambda: False,
        ...     why=lambda: "inserting waits for a draw",
        ...     remedy=lambda: "Draw",
        ...     others=lambda: False,
        ... )
        True
    """

    def __init__(self) -> None:
        self.reset_after_fork()
        on_fork(self)

    def reset_after_fork(self) -> None:
        """Begin with nobody who waits."""
        self.changed = threading.Condition()
        self._reasons: dict[int, str] = {}  # by thread

    @property
    def reasons(self) -> list[str]:
        """A line for each thread that waits."""
        return list(self._reasons.values())

    def wake(self) -> None:
        """Let those who wait look again."""
        with self.changed:
            self.changed.notify_all()

    def wait(
        self,
        may: Callable[[], bool],
        progress: Callable[[], int],
        *,
        timeout_s: float,
        stop: Callable[[], bool],
        why: Callable[[], str],
        remedy: Callable[[], str],
        others: Callable[[], bool],
    ) -> bool:
        """Wait until ``may()``.

        Args:
            may: whether to go on.
            progress: a number that changes when the others do something.
            timeout_s: how long to wait without any progress.
            stop: asked first, at each turn, whether to stop waiting. The time that it takes does not count as waiting.
            why: who waits for what, for messages.
            remedy: what to do about that, for messages.
            others: whether somebody outside this process could help.

        Returns:
            Whether ``may()``; False: ``stop()``.

        Raises:
            TimeoutError: no progress for ``timeout_s``.
            RuntimeError: nobody else could make any: this thread is the only one.
        """
        me = threading.get_ident()
        seen, until, nap = progress(), time.monotonic() + timeout_s, _FIRST_NAP_S
        try:
            self._reasons[me] = why()
            while True:
                asked = time.monotonic()
                if stop():
                    return False
                if may():
                    return True
                now = time.monotonic()
                until += now - asked
                if _is_only_thread() and not others():
                    raise RuntimeError(f"{why()}, and this is the only thread: nobody else will do it. {remedy()}.")
                if progress() != seen:
                    seen, until, nap = progress(), now + timeout_s, _FIRST_NAP_S
                if now >= until:
                    raise TimeoutError(f"waited {timeout_s:g} s in vain: {why()}. {remedy()}.")
                with self.changed:
                    self.changed.wait(min(nap, until - now))
                nap = min(2 * nap, _LONGEST_NAP_S)
        finally:
            self._reasons.pop(me, None)


def _is_only_thread() -> bool:
    me = threading.current_thread()
    return all(thread is me or thread.name.startswith(_PREFETCHERS) for thread in threading.enumerate())
