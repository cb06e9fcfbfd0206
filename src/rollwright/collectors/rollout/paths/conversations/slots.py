"""Dialogs: the conversations in the slots of an environment, and their turns that are ready for a batch."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor, Names, Saved
from rollwright.collectors.rollout.paths.conversations.dialogs import (
    EndedTurn,
    Failures,
    InSlot,
    name_of,
    packed_dialog,
)
from rollwright.data.llm.turns import FinishReason, Origin
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.core import ConversationSlots, Opening
from rollwright.envs.llm.transforms import TurnHook
from rollwright.envs.llm.undelivered import Undelivered
from rollwright.errors import EnvError, PolicyError

T = TypeVar("T", bound=InSlot)
Times = list[list[EndedTurn | None]]  # turns by time and row; None: the row has none then


class Mark(NamedTuple):
    """Where a batch began.

    Attributes:
        states: of the conversations in progress that can go on from there.
        rows: turns that were not taken.
        again: conversations to begin again.
        batch: turns that were taken since, by time and row.
    """

    states: list[dict[str, Any]]
    rows: list[list[EndedTurn]]
    again: list[Opening]
    batch: Times


class TurnTaker(Protocol):
    """Who has conversations answered, and takes their turns."""

    def act(self) -> None:
        """Have prompts answered."""

    def step(self) -> None:
        """Take what follows the answers, until there are turns for the batch."""

    def cancel(self, dialogs: Iterable[Any]) -> None:
        """Forget what conversations were asked for."""

    def follow_all(self) -> None:
        """Wait for steps, tools and rewards that are in progress."""

    def end_waits(self, in_s: float) -> None:
        """Wait no longer than ``in_s`` seconds from now on for answers, tools and rewards; called by any thread."""

    def stats(self) -> dict[str, Any]:
        """What it adds to ``stats()``."""

    def close(self) -> None:
        """End what is in progress."""


class Dialogs(Generic[T]):
    """Conversations in slots, and rows of turns that are complete and were not taken yet: an :class:`InProgress`.

    Args:
        conversations: of the environment.
        make: a conversation in a slot, before its first prompt, by its slot, its opening and the id of its trajectory.
        streams: there is one row, of turns in the order in which they end; False: a row for each slot.
        whole: conversations are delivered whole: with ``streams``, turns wait in theirs until it has ended.
        cursor: keeps account of them.
        failures: what becomes of those that fail.
        most: conversations that may be begun and not delivered; None: any number.
        marks: conversations can be put back to where a batch began; False: their states take too long, and after an
            error that is of no conversation, turns of the batch are kept for the next one.

    Attributes:
        slots: the conversations; None: there is none.
        rows: turns that were not taken.
        batch: turns of the current batch, by time and row.
        streams, cursor: as given.
        taker: what they wait for.
        hooks: what transforms of the environment do with a complete turn.
        started: whether they were begun.
        intact: whether an error has ended the batch that leaves all but its conversation as they are.
    """

    taker: TurnTaker
    hooks: list[TurnHook]

    def __init__(
        self,
        conversations: ConversationSlots,
        make: Callable[[int, Opening, int], T],
        *,
        streams: bool,
        whole: bool,
        cursor: ConversationCursor,
        failures: Failures,
        most: int | None = None,
        marks: bool = True,
    ) -> None:
        self._most, self._marks, self.hooks = most, marks, []
        count = conversations.num_slots
        self._conversations, self._make, self._failures = conversations, make, failures
        self.streams, self._whole, self._holds, self.cursor = streams, whole, streams and whole, cursor
        self.slots: list[T | None] = [None] * count
        self.rows: list[deque[EndedTurn]] = [deque() for _ in range(1 if streams else count)]
        self.batch: Times = []
        self.started = False
        self._data_is_over = False  # a slot found no prompt
        self._vacant: set[int] = set()  # slots whose conversation has ended
        self._marked: dict[Origin, dict[str, Any]] = {}  # conversations as they were where the batch began
        self._gone: set[Origin] = set()  # those that have failed since
        self._like: dict[str, Any] = {}  # further entries of the last turn
        self.intact = False

    @property
    def kind(self) -> str:
        """What the conversations are, for messages."""
        return type(self._conversations).__name__

    @property
    def undelivered(self) -> Undelivered:
        """The conversations that nobody got."""
        return self.cursor.undelivered

    def __iter__(self) -> Iterator[T]:
        """The conversations that there are."""
        return (dialog for dialog in self.slots if dialog is not None)

    @property
    def ready(self) -> list[T]:
        """Conversations whose prompt waits to be answered."""
        return [dialog for dialog in self if dialog.is_ready]

    @property
    def waiting(self) -> list[T]:
        """Conversations in which something is to follow an answer, or the first prompt is to come."""
        return [dialog for dialog in self if dialog.is_waiting]

    def row_of(self, dialog: T) -> deque[EndedTurn]:
        """Where the turns of a conversation go."""
        return self.rows[0 if self.streams else dialog.slot]

    def lack_turns(self) -> bool:
        """Whether a row has no turn to take that another one will come for."""
        if self.streams:
            return not self.rows[0] and any(not dialog.rests for dialog in self)
        return any(
            not row and dialog is not None and not dialog.rests
            for row, dialog in zip(self.rows, self.slots, strict=True)
        )

    @property
    def only_rest(self) -> bool:
        """Whether there is nothing to take, and nothing that goes on by itself."""
        return not any(self.rows) and all(dialog.rests for dialog in self)

    # Beginning and end --------------------------------------------------------------------------------

    def open(self, slot: int) -> None:
        """Begin the next conversation."""
        self.slots[slot] = None
        self._vacant.discard(slot)
        try:
            opening = self.undelivered.open(slot)
        except StopIteration:
            self._data_is_over = True
            return
        self._begin(slot, opening)

    def _begin(self, slot: int, opening: Opening, number: int = -1) -> None:
        """A conversation at its first prompt, under the id of its trajectory; if it cannot begin, it has failed."""
        error: EnvError | ValueError | None = opening.error
        opening = replace(opening, error=None)
        if error is None:
            try:
                self.slots[slot] = dialog = self._make(slot, opening, number)
                dialog.begin()
                return
            except ValueError as found:
                error = ValueError(f"{name_of(opening, 0)}: {found}")
                error.__cause__ = found
        self.slots[slot] = dialog = self._make(slot, opening, number)
        self.fail(dialog, error)

    def fill(self, *, lacking: bool = False) -> None:
        """Begin conversations where others have ended, in order of slots, whichever of them ended first.

        Where all that are left have failed, they go on.

        Args:
            lacking: only where there is no turn to take.
        """
        while slots := [slot for slot in sorted(self._vacant) if not (lacking and self.rows[slot])]:
            for slot in slots:
                if not self._may_begin():
                    break
                self.open(slot)
                if (dialog := self.slots[slot]) is not None and dialog.id < 0:
                    dialog.id = self.cursor.fresh_id()
            if self._failures.due:
                return
            if not self._may_begin():
                break
        if self.only_rest and not self.batch:
            self.wake()

    def _may_begin(self) -> bool:
        """Whether there is room for another conversation; one that begins again has had its own."""
        if self._most is None or self.undelivered.again:
            return True
        turns = itertools.chain(*self.rows, *self.batch)
        ended = sum(each is not None and each.ended is not None for each in turns)
        return len(self.undelivered) + ended + sum(1 for _ in self) < self._most

    def renew(self, slots: Iterable[int]) -> None:
        """End what is in progress, on purpose, and begin other conversations; where nothing was asked yet, it stays."""
        for slot in slots:
            dialog = self.slots[slot]
            if dialog is None or not dialog.is_untouched:
                if dialog is not None:
                    self._drop(dialog)
                    self.slots[slot] = None
                if self._may_begin():
                    self.open(slot)
                else:
                    self._vacant.add(slot)

    def keep(self, dialog: T, ended: EndedTurn) -> None:
        """A turn is complete."""
        turn = ended.turn
        for hook in self.hooks:
            hook(turn, dialog.memory)
        if turn.done:  # perhaps by a hook
            ended.ended = dialog.total, dialog.number
            if turn.finish_reason is not FinishReason.ERROR:
                self._failures.ended_well(turn.origin)
        self._like = turn.extras
        if (trace := self.undelivered.trace) is not None:
            masked = [each.turn.number for each in dialog.held if each.turn.masked]
            trace.turn(turn, ended.id, seed=dialog.seed, total=dialog.total, masked=masked)
        row = self.row_of(dialog)
        if self._holds:
            dialog.held.append(ended)
            if ended.ended is not None:
                row.extend(dialog.held)
        else:
            row.append(ended)
        if ended.ended is not None:
            self._vacate(dialog)

    def _drop(self, dialog: T) -> None:
        """A conversation ends here, on purpose: its prompt counts as done."""
        self.taker.cancel([dialog])
        gone = {dialog.id: dialog.opening}
        if not self.streams:
            gone |= {each.id: each.opening for each in self.row_of(dialog)}
            self.row_of(dialog).clear()
        self.undelivered.drop(gone.values())

    # Those that fail ----------------------------------------------------------------------------------

    def fail(self, dialog: T, error: EnvError | PolicyError | ValueError) -> None:
        """A conversation has failed: it is tried again, or what ``on_error`` says becomes of it.

        With ``"raise"``, the error is due, and the conversation rests, as it was before.
        """
        origin, failures = dialog.opening.draw.origin, self._failures
        self.taker.cancel([dialog])
        dialog.asked = False
        refused = isinstance(error, ValueError) and not dialog.has_answer  # which it would be again
        if not refused and failures.may_retry(origin) and (again := self._rewound(dialog)) is not None:
            self._go_on(again)
            return
        failures.add(origin, error)
        if failures.on_error == "mask":
            if dialog.id < 0:
                dialog.id = self.cursor.fresh_id()
            self.keep(dialog, dialog.failed(self._like))
            self._trace_failure(dialog, error)
            return
        if failures.on_error == "raise" and (again := self._rewound(dialog, far=True)) is not None:
            again.rests = True
            self._trace_failure(dialog, error)
            return
        self._trace_failure(dialog, error)
        self._take_out(dialog, 0)
        self._gone.add(origin)
        self._vacate(dialog)
        if failures.on_error == "raise":
            self.cursor.begin_again([dialog.opening])  # which ends it: turns of it were delivered
        else:
            self.undelivered.leave_out(dialog.opening, error)

    def _vacate(self, dialog: T) -> None:
        self.slots[dialog.slot] = None
        self._vacant.add(dialog.slot)

    def begin_again(self, dialog: T) -> None:
        """A conversation begins again, or ends where turns of it were delivered: nobody knows how far it is."""
        self._take_out(dialog, 0)
        self._vacate(dialog)
        self.cursor.begin_again([dialog.opening])

    def _trace_failure(self, dialog: T, error: BaseException) -> None:
        """Write that a conversation has failed, with the answer that it failed after."""
        trace = self.undelivered.trace
        if trace is None:
            return
        if dialog.has_answer:
            trace.turn(dialog.failed(self._like).turn, dialog.id, seed=dialog.seed, total=dialog.total)
        if self._failures.on_error != "drop":  # else it is written where it is left out
            trace.end(dialog.opening.draw.origin, "failed", str(error))

    def _rewound(self, dialog: T, *, far: bool = False) -> T | None:
        """A conversation that failed as it was before, in its slot; None: it cannot be.

        Args:
            dialog: the conversation.
            far: its turns of this batch are taken out of it, if there is no other way.
        """
        slot, opening = dialog.slot, dialog.opening
        if dialog.stays:
            return dialog
        state = None if not dialog.number or self._whole else dialog.before
        if state is None and far and not self._whole:
            state = self._marked.get(opening.draw.origin)
        if state is not None:
            self._take_out(dialog, state["number"])
            self._put([state], Names(None))
            return self.slots[slot]
        if dialog.number and not self._whole and not (far and not self.cursor.was_delivered(opening)):
            return None
        self._take_out(dialog, 0)
        number = self.cursor.fresh_id() if dialog.number or dialog.id < 0 else dialog.id
        again = self.slots[slot] = self._make(slot, opening, number)
        return again

    def _take_out(self, dialog: T, number: int) -> None:
        """Take turns of a conversation out of rows and batch, from a number on."""

        def stays(each: EndedTurn | None) -> bool:
            return each is None or each.id != dialog.id or each.turn.number < number

        for row in self.rows:
            kept = [each for each in row if stays(each)]
            row.clear()
            row.extend(kept)
        if self._failures.on_error == "raise":  # whose batch is put together again
            for turns in self.batch:
                turns[:] = [each if stays(each) else None for each in turns]

    def _go_on(self, dialog: T) -> None:
        dialog.rests = False
        if dialog.is_untouched and not dialog.has_prompt:
            self._begin(dialog.slot, self.undelivered.load(dialog.slot, dialog.opening), dialog.id)

    def delivered(self) -> None:
        """A batch has reached the consumer."""
        self.wake()

    def wake(self) -> None:
        """Those that have failed go on."""
        for dialog in list(self):
            if dialog.rests:
                self._go_on(dialog)

    def raise_due(self) -> None:
        """Raise the next error that is due, if there is one: all other conversations stay as they are."""
        if self._failures.due:
            self.intact = True
            raise self._failures.due.popleft()

    def raise_of_all(self, error: BaseException) -> None:
        """Raise an error that is of no conversation, and leaves all as they are."""
        self._failures.due.appendleft(error)
        self.raise_due()

    def _clear(self) -> None:
        """Take all out of slots and rows."""
        self.taker.cancel(self)
        self._conversations.clear()
        self.slots = [None] * len(self.slots)
        self._vacant.clear()
        for row in self.rows:
            row.clear()
        self._data_is_over = False

    # What their cursor asks of them -------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of a batch and slots, where another number of workers can go on; None: it cannot."""
        return len(self.rows), len(self.slots)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to go on with."""
        return self._data_is_over and not any(self.rows) and not any(True for _ in self)

    def begun(self) -> list[Opening]:
        """Conversations in which something was asked, and which go on, or have turns that were not taken."""
        ahead = [each.opening for each in itertools.chain(*self.rows)]
        return ahead + [dialog.opening for dialog in self if not dialog.is_untouched]

    def _openings(self, batch: Times) -> list[Opening]:
        """Of all conversations that have turns in a batch or in rows, or are in slots."""
        turns = itertools.chain(*batch, *self.rows)
        return [each.opening for each in turns if each is not None] + [dialog.opening for dialog in self]

    def interrupt(self) -> list[Opening]:
        """Take all out, with the turns of the current batch; returns what nobody got."""
        found = self._openings(self.batch)
        self._clear()
        self.batch, self.started = [], False
        return found

    def look_ahead(self) -> None:
        """See :meth:`InProgress.look_ahead`."""
        if self.started:
            self.fill()
        else:
            self.renew(range(len(self.slots)))

    def keep_before(self, dialog: T) -> None:
        """Keep a conversation as it is before an answer, where its turn may not be complete when the batch is."""
        dialog.before = None
        may_be_left = self.streams or self.row_of(dialog) if self._marks else self.cursor.keeps_place
        if dialog.number and not self._holds and (may_be_left or self._failures.retries):
            with suppress(Exception):  # the environment may fail in any way
                dialog.before = dialog.state_dict(self._conversations.state(dialog.slot))

    def _saved(self, dialog: T, *, waits: bool) -> dict[str, Any]:
        """A conversation between an outcome and an answer; at its end, or, without ``waits``, before its last answer.

        Raises:
            Exception: of any kind: the environment cannot save it.
        """
        if not dialog.has_answer:
            return dialog.state_dict(self._conversations.state(dialog.slot))
        if waits:
            return dialog.state_dict(self._conversations.ended_state(dialog.slot))
        if dialog.before is None:
            raise EnvError(f"{dialog.name}: it could not be saved before its last answer.")
        return dialog.before

    def _left(self, *, waits: bool) -> tuple[list[dict[str, Any]], list[list[EndedTurn]], list[tuple[Opening, str]]]:
        """Conversations in slots and turns in rows; and what of it cannot be saved, see :attr:`Saved.lost`."""
        states: list[dict[str, Any]] = []
        lost: list[tuple[Opening, str]] = []
        kept: dict[Origin, int] = {}  # turns of those that are not saved as they are
        for dialog in self:
            try:
                states.append(self._saved(dialog, waits=waits))
            except Exception as error:
                if (state := self._marked.get(dialog.opening.draw.origin)) is not None:
                    states.append(state)
                    kept[dialog.opening.draw.origin] = state["number"]
                elif not dialog.is_untouched:
                    lost.append((dialog.opening, f"{type(error).__name__}: {error}"))
                    kept[dialog.opening.draw.origin] = 0
        rows = [
            [each for each in row if each.turn.number < kept.get(each.opening.draw.origin, math.inf)]
            for row in self.rows
        ]
        return states, rows, lost

    def mark(self) -> Mark:
        """Where they are, for :meth:`go_back`; a batch begins."""
        self.batch, self._gone, self.intact = [], set(), False
        if self._holds or not self._marks:  # nothing of a conversation in progress was taken, or nothing is put back
            return Mark([], [list(row) for row in self.rows], list(self.undelivered.again), self.batch)
        states, rows, _ = self._left(waits=False)
        begun = [state for state in states if state["number"]]  # the others begin again
        self._marked = {state["opening"].draw.origin: state for state in begun}
        return Mark(begun, rows, list(self.undelivered.again), self.batch)

    def take_batch(self) -> Times:
        """The turns of the batch, which is complete."""
        times, self.batch, self._marked = self.batch, [], {}
        return times

    def go_back(self, mark: Mark, *, keeps: bool) -> list[Opening]:
        """See :meth:`InProgress.go_back`; turns that were taken since are taken again, unless they are as they were."""
        if self.intact or (keeps and not self._marks):
            for place, row in enumerate(self.rows):
                row.extendleft(each for turns in reversed(mark.batch) if (each := turns[place]) is not None)
            mark.batch.clear()
            return []
        if not self._marks:
            return [*self._openings(mark.batch), *self.interrupt()]
        since = [*mark.again, *self._openings(mark.batch), *self.undelivered.again]
        mark.batch.clear()
        self.undelivered.again.clear()
        self._clear()
        for row, turns in zip(self.rows, mark.rows, strict=True):
            row.extend(each for each in turns if each.opening.draw.origin not in self._gone)
        self._put([each for each in mark.states if each["opening"].draw.origin not in self._gone], Names(None))
        kept = self._gone | {each["opening"].draw.origin for each in mark.states}
        kept |= {each.opening.draw.origin for each in itertools.chain(*self.rows)}
        return [opening for opening in since if opening.draw.origin not in kept]

    def save(self, *, waits: bool, alone: bool) -> Saved:
        """Save what is in progress."""
        if alone:
            return Saved({"dialogs": [], "rows": packed([[] for _ in self.rows]), "row_ids": None})
        unsaved: list[str] = []
        try:
            if waits:
                self.taker.follow_all()
        except Exception as error:  # of the environment; the next rollout raises it, if it is still there
            names = ", ".join(dialog.name for dialog in self.waiting)
            unsaved.append(f"what follows the answer in {names} is lost, and it is asked again: {error}")
            self.cursor.begin_again(self.go_back(self.mark(), keeps=True))
        states, rows, lost = self._left(waits=waits)
        found = {
            "dialogs": [packed_dialog(state) for state in states],
            "rows": packed(rows),
            "row_ids": torch.from_numpy(self.row_ids()) if self.started else None,
        }
        return Saved(found, lost, unsaved)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`InProgress.check_state`.

        Raises:
            ValueError: it was saved with another number of environments, another ``async_envs``, or of other data.
        """
        self.undelivered.source.check_state(state_dict["source"])
        sizes = len(unpacked(state_dict["rows"])), len(self.rows)
        if sizes[0] != sizes[1]:
            saved, own_rows = (
                "async_envs=True, or one environment" if number == 1 else f"{number} environments that take turns"
                for number in sizes
            )
            raise ValueError(
                f"state_dict: it was saved with {saved}, and this collector has {own_rows}. Make it with the same "
                "batch_size of the environment, and the same async_envs."
            )

    def load(self, state_dict: Mapping[str, Any], names: Names, place: Callable[[], None]) -> None:
        """Go on from what :meth:`save` saved."""
        place()
        for row, turns in zip(self.rows, unpacked(state_dict["rows"]), strict=True):
            row.extend(replace(each, id=names.of(each.id)) for each in turns)
        self._put([saved for saved in map(unpacked, state_dict["dialogs"]) if saved["slot"] < len(self.slots)], names)
        self.started = state_dict["row_ids"] is not None
        if self.started:
            self.fill()

    def _put(self, states: Sequence[Mapping[str, Any]], names: Names) -> None:
        """Put conversations that were saved into their slots; :meth:`fill` begins others in those that have none."""
        ended = [each.opening for each in itertools.chain(*self.rows) if each.ended is not None]
        for opening in [*ended, *(saved["opening"] for saved in states)]:
            self.undelivered.source.claim(opening.draw.origin)
        for saved in states:
            dialog = self._make(saved["slot"], saved["opening"], -1)
            dialog.load(saved)
            dialog.id = names.of(dialog.id)
            dialog.held = [replace(each, id=dialog.id) for each in dialog.held]
            self.slots[dialog.slot] = dialog
            self._conversations.load(dialog.slot, dialog.opening, dialog.messages, saved["environment"])
        self._vacant.update(slot for slot, dialog in enumerate(self.slots) if dialog is None)

    # What they show -----------------------------------------------------------------------------------

    def row_ids(self) -> NDArray[np.int64]:
        """Ids of the trajectories that the rows go on with, see :meth:`Path.row_ids`."""
        if self.streams:
            return np.asarray([self.rows[0][0].id if self.rows[0] else -1], np.int64)
        return np.asarray([self._row_id(slot) for slot in range(len(self.slots))], np.int64)

    def _row_id(self, slot: int) -> int:
        row, dialog = self.rows[slot], self.slots[slot]
        if row:
            return row[0].id
        return -1 if dialog is None or dialog.is_untouched else dialog.id

    def num_ahead(self) -> int:
        """Turns that are complete and were not taken."""
        return sum(map(len, self.rows)) + sum(len(dialog.held) for dialog in self)
