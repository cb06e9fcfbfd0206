"""SampleToInsertRatio: keeps sampling and collecting at one pace, whichever is faster."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rollwright._interrupts import uninterrupted
from rollwright.data.replay_buffers._threads import ProgressCondition
from rollwright.data.replay_buffers.storages.batches import positive

T = TypeVar("T")


class Counts(NamedTuple):
    """Counters of a buffer that its limiter reads.

    Attributes:
        write_count: elements written so far, by whatever process.
        num_stored: elements that are there.
        can_draw: whether, once something was written, nothing that may be drawn from is empty.
        is_shared: whether other processes may write.
        max_size: elements that it has room for.
    """

    write_count: Callable[[], int]
    num_stored: Callable[[], int]
    can_draw: Callable[[], bool]
    is_shared: Callable[[], bool]
    max_size: int


def _no_stop() -> bool:
    return False


class SampleToInsertRatio:
    """Keeps the number of items drawn from a replay buffer in a ratio to the number inserted.

    With ``sampled`` the items that ``sample()`` has delivered in this process, and ``inserted`` the buffer's
    ``write_count``, which counts what other processes write too::

        balance = samples_per_insert * (inserted - min_size) - sampled,    -margin <= balance <= margin

    Drawing n items waits while ``balance - n < -margin``, and until ``min_size`` are stored. A rollout of m frames
    waits to begin while ``balance + samples_per_insert * m > margin``, once ``min_size`` are stored. (After the rate
    limiters of Reverb, Cassirer et al. 2021, https://arxiv.org/abs/2102.04736, where ``margin`` is called the error
    buffer.) Where the buffer holds something already when it is made, is emptied, or is loaded from a state without a
    limiter, the balance is taken for 0 there, or as soon as ``min_size`` are stored. What goes into members of an
    ensemble beyond the margin, while another of them is empty, does not count. Neither side waits for the other for
    ever if::

        2 * margin >= batch_size + samples_per_insert * frames_per_batch

    Only ``sample()`` and collectors wait, a collector before a rollout begins. ``extend()`` and ``add()`` do not:
    whoever inserts by hand asks :meth:`may_insert` or :meth:`await_insert`. Above ``margin`` the balance may be by what
    is in progress: by one rollout for each further collector of the buffer, and by trajectories that are written when
    they are complete. Copies of the buffer, in this process or another, have no limiter; a copy of a limiter limits
    nothing yet.

    Args:
        samples_per_insert: items drawn for each item inserted; above 0.
        margin: by how many items drawn each side may be ahead.
        min_size: items in the buffer before the first is drawn; at least 1. In an ensemble: over all members, and
            one in each.
        timeout_s: how long one side waits without any sign of the other: longer than the longest rollout, and the
            longest stretch of a program without a sample (an evaluation, say).

    Raises:
        ValueError, TypeError: a number is out of range, or both sides would wait for one another.

    Example:
        >>> import torch
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer, SampleToInsertRatio
        >>> limiter = SampleToInsertRatio(2.0, margin=8, min_size=4)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, limiter=limiter)
        >>> _ = buffer.extend(torch.arange(6))
        >>> limiter.balance, limiter.may_insert(2), limiter.may_insert(3)
        (4.0, True, False)
        >>> _ = buffer.sample()
        >>> limiter.balance, limiter.may_insert(3)
        (0.0, True)
    """

    def __init__(self, samples_per_insert: float, *, margin: float, min_size: int = 1, timeout_s: float = 60.0) -> None:
        self.samples_per_insert = _above_zero("samples_per_insert", samples_per_insert)
        self.margin = _above_zero("margin", margin)
        self.min_size = positive("min_size", min_size)
        self.timeout_s = _above_zero("timeout_s", timeout_s)
        self._frames = self._batch_size = 1  # the most that is inserted, and drawn, at a time, as far as is known
        self._counts: Counts | None = None
        self._base = self._sampled = self._at_base = 0  # write_count and sampled where the balance was 0
        self.progress = ProgressCondition()
        self._listeners: list[Callable[[], None]] = []
        self._inserters: list[Callable[[], str]] = []
        self._process = os.getpid()
        SampleToInsertRatio.check(self)

    def __reduce__(self) -> Any:
        numbers = {"margin": self.margin, "min_size": self.min_size, "timeout_s": self.timeout_s}
        return partial(SampleToInsertRatio, **numbers), (self.samples_per_insert,)  # type: ignore[arg-type]

    # What it is put to --------------------------------------------------------------------------

    def bind(self, counts: Counts, batch_size: int | None) -> None:
        """Limit a buffer, for good.

        Raises:
            ValueError: it limits another, or could not work with this one.
        """
        if self._counts is not None:
            raise ValueError("limiter: expected one for each buffer, got one that limits another. Make a second one.")
        if self.min_size > counts.max_size:
            raise ValueError(
                f"min_size: expected at most {counts.max_size}, which the storage has room for, got {self.min_size}: "
                "sampling would wait for ever. Make the storage larger, or min_size smaller."
            )
        self.check(batch_size=batch_size)
        self._counts = counts
        self.begin()

    def check(self, *, frames: int | None = None, batch_size: int | None = None) -> None:
        """Refuse numbers with which both sides would wait for one another.

        Args:
            frames: the most that somebody inserts at a time; remembered.
            batch_size: the most that somebody draws at a time; remembered.

        Raises:
            ValueError: the margin is too small for them.
        """
        frames, batch_size = max(self._frames, frames or 1), max(self._batch_size, batch_size or 1)
        least = (batch_size + self.samples_per_insert * frames) / 2
        if self.margin < least:
            raise ValueError(
                f"margin: expected at least (batch_size + samples_per_insert * frames_per_batch) / 2 = ({batch_size} + "
                f"{self.samples_per_insert:g} * {frames}) / 2 = {least:g}, got {self.margin:g}: sampling and "
                f"collecting could wait for one another. Pass margin={math.ceil(least)} or more, or draw or collect "
                "fewer at a time."
            )
        self._frames, self._batch_size = frames, batch_size

    def begin(self) -> None:
        """Take the balance for 0 as soon as ``min_size`` elements are stored, or now if they are."""
        if self._counts is not None and self._active:
            lacking = max(0, self.min_size - self._counts.num_stored())
            with self.progress.changed:
                self._base, self._at_base = self._counts.write_count() + lacking, self._sampled
            self.drew()

    # Counts -------------------------------------------------------------------------------------

    @property
    def inserted(self) -> int:
        """Elements written so far, by whatever process."""
        return 0 if self._counts is None else self._counts.write_count()

    @property
    def sampled(self) -> int:
        """Elements drawn so far in this process."""
        return self._sampled

    @property
    def balance(self) -> float:
        """How far inserting is ahead of sampling; it stays between ``-margin`` and ``margin``."""
        return self._balance_at(self.inserted)

    def _balance_at(self, inserted: int) -> float:
        return self.samples_per_insert * (inserted - self._base) - (self._sampled - self._at_base)

    @property
    def _active(self) -> bool:
        """Whether there is something to limit here; what a fork inserts is limited in the process it comes from."""
        return self._counts is not None and self._process == os.getpid()

    def _is_shared(self) -> bool:
        """Whether other processes can insert."""
        return self._counts is not None and self._counts.is_shared()

    def _is_warm(self, inserted: int) -> bool:
        return self._counts is None or (inserted >= self._base and self._counts.can_draw())

    # Inserting ----------------------------------------------------------------------------------

    def may_insert(self, frames: int) -> bool:
        """Whether so many may be inserted now, those included that are in progress."""
        if not self._active:
            return True
        inserted = self.inserted
        ahead = self._balance_at(inserted) + self.samples_per_insert * frames
        if ahead <= self.margin:
            return True
        if self._is_warm(inserted):
            return False
        self._discount(frames)
        return True

    def _discount(self, frames: int) -> None:
        """Do not count what goes beyond the margin by so many more, where nothing can be drawn for lack of others."""
        with self.progress.changed:
            inserted = self.inserted
            beyond = self._balance_at(inserted) + self.samples_per_insert * frames - self.margin
            if beyond > 0 and inserted >= self._base and not self._is_warm(inserted):
                self._base = min(inserted, self._base + math.ceil(beyond / self.samples_per_insert))

    def await_insert(self, frames: int, *, stop: Callable[[], bool] = _no_stop, whom: str = "the collector") -> bool:
        """Wait until so many may be inserted; not to be called where a lock is held.

        Args:
            frames: how many, those included that are in progress.
            stop: asked again and again, at least every 10 ms: whether to stop waiting. It may take its time, which does
                not count as waiting.
            whom: who waits, for messages.

        Returns:
            Whether they may be inserted; False: ``stop`` returned True.

        Raises:
            TimeoutError: nothing was drawn for ``timeout_s``.
            RuntimeError: nobody else could draw: this thread is the only one.
        """
        if self.may_insert(frames):
            return True

        def why() -> str:
            return (
                f"{whom} waits to insert {frames} items until {self._lacking(frames):,.0f} more are drawn "
                f"({self._numbers()})"
            )

        def remedy() -> str:
            return (
                "Draw more batches for each rollout, pass a smaller samples_per_insert or a larger margin, or collect "
                "in the background: start()"
            )

        return self.progress.wait(
            lambda: self.may_insert(frames),
            lambda: self.sampled,
            timeout_s=self.timeout_s,
            stop=stop,
            why=why,
            remedy=remedy,
            others=self._do_others_draw,
        )

    def _do_others_draw(self) -> bool:
        """Whether somebody outside this process may draw."""
        return False

    def _lacking(self, frames: int) -> float:
        """Items to be drawn before so many may be inserted."""
        return max(0.0, self.balance + self.samples_per_insert * frames - self.margin)

    def wants(self, frames: int) -> str:
        """What inserting waits for, as a phrase."""
        return f"samples: {self._lacking(frames):,.0f} more items must be drawn before {frames} are inserted"

    def inserted_more(self) -> None:
        """Wake who waits for inserts of this process; those of others are noticed within 10 ms."""
        if self.progress.reasons and self._active:  # a fork may have come while a thread held the lock
            self.progress.wake()

    def add_inserter(self, status: Callable[[], str]) -> Callable[[], None]:
        """Let sampling ask, while it waits, what became of somebody who inserts.

        Args:
            status: what they do, as a phrase for a message; raises what went wrong with them.

        Returns:
            Takes it back.
        """
        return _added(self._inserters, status)

    # Sampling -----------------------------------------------------------------------------------

    def draw(self, size: int, draw: Callable[[], T], count: Callable[[T], int]) -> T:
        """Run ``draw()`` as soon as ``size`` items may be drawn, and count what came.

        Args:
            size: items.
            draw: draws them.
            count: how many came: slices may be short.

        Raises:
            TimeoutError: nothing was inserted for ``timeout_s``.
            RuntimeError: nobody else could insert: this thread is the only one.
            ValueError: the margin is too small for so many.
        """
        if not self._active:
            return draw()
        if size > self._batch_size:
            self.check(batch_size=size)
        mine: list[int] = []
        try:
            if not self._taken(size, mine):
                self._await_inserts(size, mine)
            drawn = draw()
        except BaseException:
            self._count(-sum(mine))
            raise
        self._count(count(drawn) - size)
        return drawn

    def may_draw(self, size: int) -> bool:
        """Whether so many may be drawn now, by a process that draws for others."""
        if not self._active:
            return True
        self.check(batch_size=size)
        inserted = self.inserted
        return self._balance_at(inserted) - size >= -self.margin and self._is_warm(inserted)

    def lacks(self, size: int) -> str:
        """What drawing waits for, as a phrase."""
        lacking = max(0, self._base - self.inserted)
        if not lacking and not self._is_warm(self.inserted):
            return f"sample() waits to draw {size} items until every member holds some ({self._numbers()})"
        lacking = lacking or max(0, math.ceil((size - self.margin - self.balance) / self.samples_per_insert))
        return f"sample() waits to draw {size} items until {lacking:,} more are inserted ({self._numbers()})"

    def _taken(self, size: int, mine: list[int]) -> bool:
        """Count ``size`` items as drawn, if they may be, and note that in ``mine``."""
        with uninterrupted, self.progress.changed:
            inserted = self.inserted
            if self._balance_at(inserted) - size < -self.margin or not self._is_warm(inserted):
                return False
            self._sampled += size
            mine.append(size)
        return True

    def _count(self, more: int) -> None:
        if more:
            with self.progress.changed:
                self._sampled += more
        self.drew()

    def ask_inserters(self) -> bool:
        """Raise what went wrong with those who insert; False, if nothing did."""
        for status in list(self._inserters):
            status()
        return False

    def _await_inserts(self, size: int, mine: list[int]) -> None:
        def remedy() -> str:
            theirs = "; ".join(status() for status in list(self._inserters)) or "no collector runs in the background"
            return (
                f"Who inserts: {theirs}. Collect more frames for each batch drawn, pass a larger samples_per_insert or "
                "margin, or collect in the background: start()"
            )

        self.progress.wait(
            lambda: self._taken(size, mine),
            lambda: self.inserted,
            timeout_s=self.timeout_s,
            stop=self.ask_inserters,
            why=lambda: self.lacks(size),
            remedy=remedy,
            others=self._is_shared,
        )

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback()`` whenever something was drawn, in the thread that drew; it must not wait.

        Returns:
            Takes it back.
        """
        return _added(self._listeners, callback)

    def drew(self) -> None:
        """Tell those who insert that something was drawn."""
        self.inserted_more()
        for callback in list(self._listeners):
            callback()

    # State --------------------------------------------------------------------------------------

    def _numbers(self) -> str:
        return (
            f"{self.inserted:,} inserted, {self.sampled:,} drawn; samples_per_insert={self.samples_per_insert:g}, "
            f"min_size={self.min_size:,}, balance={self.balance:,.0f}, margin={self.margin:,g}"
        )

    def stats(self) -> dict[str, Any]:
        """``inserted``, ``sampled``, ``balance``, ``margin``, and ``waiting``: a line for each who waits."""
        return {
            "inserted": self.inserted,
            "sampled": self._sampled,
            "balance": self.balance,
            "margin": self.margin,
            "waiting": self.progress.reasons,
        }

    def state_dict(self) -> dict[str, int]:
        """The counts; they go with the state of the buffer."""
        return {"sampled": self._sampled, "base": self._base, "at_base": self._at_base}

    def load_state_dict(self, state_dict: Mapping[str, int] | None) -> None:
        """Go on with the counts of a state; None: see :meth:`begin`."""
        self.check_state(state_dict)
        if state_dict is None:
            self.begin()
            return
        with self.progress.changed:
            self._sampled, self._base = state_dict["sampled"], state_dict["base"]
            self._at_base = state_dict["at_base"]
        self.drew()

    @staticmethod
    def check_state(state_dict: Any) -> None:
        """Test that it is a state of :meth:`state_dict`, or None.

        Raises:
            KeyError, TypeError: it is that of something else.
        """
        if state_dict is None:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected the counts of a limiter, got {type(state_dict).__name__}.")
        missing = [name for name in ("sampled", "base", "at_base") if name not in state_dict]
        if missing:
            raise KeyError(
                f"state_dict: expected the counts of a limiter, got {sorted(state_dict)}: {missing} missing."
            )

    def __repr__(self) -> str:
        return (
            f"SampleToInsertRatio({self.samples_per_insert:g}, margin={self.margin:g}, min_size={self.min_size}, "
            f"timeout_s={self.timeout_s:g})"
        )


def _above_zero(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number above 0, got {type(value).__name__}: {value!r}.")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value}.")
    return float(value)


def _added(to: list[Callable[[], T]], what: Callable[[], T]) -> Callable[[], None]:
    to.append(what)

    def remove() -> None:
        if what in to:
            to.remove(what)

    return remove
