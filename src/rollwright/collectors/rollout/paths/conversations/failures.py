"""Failures: what becomes of conversations that fail, and how many have."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from rollwright.collectors.options import CollectorOptions
from rollwright.data.llm.turns import Origin
from rollwright.errors import EnvError


class Failures:
    """Counts failures, and knows what the options say of them: ``on_error``, ``max_retries`` and ``max_failures``.

    Args:
        options: of the collector.
        counts: where they are counted, by class of what was raised.

    Attributes:
        on_error: ``"raise"``, ``"drop"`` or ``"mask"``.
        retries: whether anything is tried again.
        due: errors that the rollout raises next.
    """

    def __init__(self, options: CollectorOptions, counts: Callable[[], Counter[str]]) -> None:
        self.on_error, self._most_retries = options.on_error, options.max_retries
        self._most_in_a_row, self._counts = options.max_failures, counts
        self.retries = self._most_retries > 0
        self.due: deque[BaseException] = deque()
        self._tried: Counter[Origin | None] = Counter()  # how often again; None: the engine as a whole
        self._in_a_row = 0

    def may_retry(self, origin: Origin | None) -> bool:
        """Whether a conversation (or, with None, the engine) is tried once more; that counts."""
        if self._tried[origin] >= self._most_retries:
            self._tried.pop(origin, None)
            return False
        self._tried[origin] += 1
        return True

    def ended_well(self, origin: Origin | None) -> None:
        """A conversation has ended, or the engine has answered."""
        self._tried.pop(origin, None)
        if origin is not None:
            self._in_a_row = 0

    def add(self, origin: Origin, error: BaseException) -> None:
        """A conversation has failed for good."""
        self._tried.pop(origin, None)
        self._counts()[type(error.__cause__ or error).__name__] += 1
        if self.on_error == "raise":
            if not any(each is error for each in self.due):  # a reward of a whole group fails once
                self.due.append(error)
            return
        self._in_a_row += 1
        if self._in_a_row >= self._most_in_a_row:
            text = (
                f"on_error={self.on_error!r}: {self._in_a_row} conversations have failed, and none has ended well "
                f"between them. The last: {error} Correct the cause, or pass a larger max_failures."
            )
            stop = EnvError(text)
            stop.__cause__ = error
            self.due.append(stop)
            self._in_a_row = 0
