"""Dialogs: the conversations in the slots of an environment, and their turns that are ready for a batch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright.collectors.rollout.paths.conversations.cursor import Names, Saved
from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog, EndedTurn, name_of, own
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.turns import Origin
from rollwright.envs.checkpoint.packed import packed, unpacked
from rollwright.envs.llm.core import Conversations, Opening
from rollwright.envs.llm.undelivered import Undelivered
from rollwright.errors import EnvError

__all__ = ["Dialogs", "Mark"]


class Mark(NamedTuple):
    """Where a batch began.

    Attributes:
        states: of the conversations in progress that can go on from there.
        rows: turns that were not taken.
        again: conversations to begin again.
        batch: turns that were taken since, by time and row.
    """

    states: dict[Origin, dict[str, Any]]
    rows: list[list[EndedTurn]]
    again: list[Opening]
    batch: list[list[EndedTurn | None]]


class Dialogs:
    """Conversations in slots, and rows of turns that are complete and were not taken yet.

    Args:
        conversations: of the environment.
        chain: makes the tokens of a conversation.
        streams: there is one row, of turns in the order in which they end; False: a row for each slot.
        holds: turns wait in their conversation until it has ended: it is delivered whole, from one row.
        undelivered: conversations that nobody got.
        fresh_id: hands out trajectory ids.

    Attributes:
        slots: the conversations; None: there is none.
        rows: turns that were not taken.
        data_is_over: whether a slot found no prompt.
    """

    def __init__(
        self,
        conversations: Conversations,
        chain: Callable[[], TokenChain],
        *,
        streams: bool,
        holds: bool,
        undelivered: Undelivered,
        fresh_id: Callable[[], int],
    ) -> None:
        count = conversations.num_slots
        self._conversations, self._chain, self._fresh_id = conversations, chain, fresh_id
        self._streams, self._holds = streams, holds
        self.slots: list[Dialog | None] = [None] * count
        self.rows: list[deque[EndedTurn]] = [deque() for _ in range(1 if streams else count)]
        self._undelivered = undelivered
        self.data_is_over = False
        self._vacant: set[int] = set()  # slots whose conversation has ended

    def __iter__(self) -> Iterator[Dialog]:
        """The conversations that there are."""
        return (dialog for dialog in self.slots if dialog is not None)

    @property
    def begun(self) -> list[Dialog]:
        """Conversations in which something was asked."""
        return [dialog for dialog in self if not dialog.is_untouched]

    @property
    def ready(self) -> list[Dialog]:
        """Conversations whose prompt waits to be answered."""
        return [dialog for dialog in self if dialog.is_ready]

    @property
    def waiting(self) -> list[Dialog]:
        """Conversations in which something is to follow an answer."""
        return [dialog for dialog in self if dialog.pending is not None]

    def row_of(self, dialog: Dialog) -> deque[EndedTurn]:
        """Where the turns of a conversation go."""
        return self.rows[0 if self._streams else dialog.slot]

    def lack_turns(self) -> bool:
        """Whether a row has no turn to take that another one will come for."""
        if self._streams:
            return not self.rows[0] and any(True for _ in self)
        return any(not row and dialog is not None for row, dialog in zip(self.rows, self.slots, strict=True))

    @property
    def are_over(self) -> bool:
        """Whether the data is over, and all was taken."""
        return self.data_is_over and not any(self.rows) and all(dialog is None for dialog in self.slots)

    # Beginning and end --------------------------------------------------------------------------------

    def open(self, slot: int) -> None:
        """Begin the next conversation."""
        self.slots[slot] = None
        self._vacant.discard(slot)
        try:
            opening = self._undelivered.open(slot)
        except StopIteration:
            self.data_is_over = True
            return
        try:
            self.slots[slot] = Dialog.begun(slot, opening, self._chain())
        except ValueError as error:
            raise ValueError(f"{name_of(opening, 0)}: {error}") from error

    def open_with_id(self, slots: Iterable[int]) -> None:
        """Begin conversations, with new trajectory ids."""
        for slot in slots:
            self.open(slot)
            if (dialog := self.slots[slot]) is not None:
                dialog.id = self._fresh_id()

    def fill(self) -> None:
        """Begin conversations where others have ended, in order of slots, whichever of them ended first."""
        self.open_with_id(sorted(self._vacant))

    def keep(self, dialog: Dialog, ended: EndedTurn) -> None:
        """A turn is complete."""
        row = self.row_of(dialog)
        if self._streams and self._holds:
            dialog.held.append(ended)
            if ended.ended is not None:
                row.extend(dialog.held)
        else:
            row.append(ended)
        if ended.ended is not None:
            self.slots[dialog.slot] = None
            self._vacant.add(dialog.slot)

    def drop(self, dialog: Dialog) -> None:
        """A conversation ends here, on purpose: its prompt counts as done."""
        gone = {dialog.id: dialog.opening}
        if not self._streams:
            gone |= {each.id: each.opening for each in self.row_of(dialog)}
            self.row_of(dialog).clear()
        self._undelivered.drop(gone.values())

    def clear(self) -> None:
        """Take all out of slots and rows."""
        self._conversations.clear()
        self.slots = [None] * len(self.slots)
        self._vacant.clear()
        for row in self.rows:
            row.clear()
        self.data_is_over = False

    # There and back -----------------------------------------------------------------------------------

    def _saved(self, dialog: Dialog, *, waits: bool) -> dict[str, Any]:
        """A conversation between an outcome and an answer; at its end, or, without ``waits``, before its last answer.

        Raises:
            Exception: of any kind: the environment cannot save it.
        """
        if dialog.pending is None:
            return dialog.state_dict(self._conversations.state(dialog.slot))
        if waits:
            return dialog.state_dict(self._conversations.ended_state(dialog.slot))
        if dialog.before is None:
            raise EnvError(f"{dialog.name}: it could not be saved before its last answer.")
        return dialog.before

    def before_answer(self, dialog: Dialog) -> dict[str, Any] | None:
        """A conversation whose last answer was not taken, or not asked for; None: it can only begin again."""
        with suppress(Exception):  # the environment may fail in any way
            return self._saved(dialog, waits=False)
        return None

    def mark(self, batch: list[list[EndedTurn | None]], *, saves: bool) -> Mark:
        """Where they are.

        Args:
            batch: takes the turns from here on.
            saves: whether conversations in progress are to go on; if not, they begin again.
        """
        found = {each.opening.draw.origin: self.before_answer(each) for each in self if saves and each.number}
        states = {origin: state for origin, state in found.items() if state is not None}
        unsaved = found.keys() - states.keys()
        rows = [[each for each in row if each.opening.draw.origin not in unsaved] for row in self.rows]
        return Mark(states, rows, list(self._undelivered.again), batch)

    def go_back(self, mark: Mark) -> list[Opening]:
        """Put slots and rows back to where they were; returns what was begun since then, or cannot go on."""
        taken = [each.opening for turns in mark.batch for each in turns if each is not None]
        since = [*mark.again, *taken, *self.openings(), *self._undelivered.again]
        kept = {*mark.states, *(each.opening.draw.origin for row in mark.rows for each in row)}
        mark.batch.clear()
        self._undelivered.again.clear()
        self.clear()
        for row, turns in zip(self.rows, mark.rows, strict=True):
            row.extend(turns)
        self._put(mark.states.values(), Names(None))
        self._vacate()
        return [opening for opening in since if opening.draw.origin not in kept]

    def save(self, *, waits: bool) -> Saved:
        """What is in slots and rows, see :meth:`InProgress.save`."""
        found: list[torch.Tensor] = []
        lost: list[tuple[Opening, str | None]] = []
        for dialog in self:
            try:
                found.append(packed(self._saved(dialog, waits=waits)))
            except Exception as error:
                reason = None if dialog.is_untouched else f"{type(error).__name__}: {error}"
                lost.append((dialog.opening, reason))
        gone = {opening.draw.origin for opening, _ in lost}
        rows = [[own(each) for each in row if each.opening.draw.origin not in gone] for row in self.rows]
        return Saved({"dialogs": found, "rows": packed(rows)}, lost)

    def load(self, state_dict: Mapping[str, Any], names: Names) -> None:
        """Go on from a saved state, in slots and rows that are empty.

        Args:
            state_dict: of :meth:`save`; its ``row_ids`` are None where nothing was begun.
            names: of trajectories.
        """
        for row, turns in zip(self.rows, unpacked(state_dict["rows"]), strict=True):
            row.extend(replace(each, id=names.of(each.id)) for each in turns)
        for each in itertools.chain(*self.rows):
            if each.ended is not None:
                self._undelivered.source.claim(each.opening.draw.origin)
        found = [saved for saved in map(unpacked, state_dict["dialogs"]) if saved["slot"] < len(self.slots)]
        self._put(found, names)
        if state_dict["row_ids"] is not None:
            self._vacate()
            self.fill()

    def _put(self, states: Iterable[Mapping[str, Any]], names: Names) -> None:
        """Put conversations that were saved into their slots."""
        states = list(states)
        for saved in states:
            self._undelivered.source.claim(saved["opening"].draw.origin)
        for saved in states:
            dialog = Dialog.loaded(saved, self._chain())
            dialog.id = names.of(dialog.id)
            dialog.held = [replace(each, id=dialog.id) for each in dialog.held]
            self.slots[dialog.slot] = dialog
            self._conversations.load(dialog.slot, dialog.opening, dialog.messages, saved["environment"])

    def _vacate(self) -> None:
        """Have :meth:`fill` begin conversations in all slots that have none."""
        self._vacant.update(slot for slot, dialog in enumerate(self.slots) if dialog is None)

    # What they show -----------------------------------------------------------------------------------

    def openings(self) -> list[Opening]:
        """Of all conversations that have turns in rows, or are in slots."""
        ahead = [each.opening for each in itertools.chain(*self.rows)]
        return ahead + [dialog.opening for dialog in self]

    def row_ids(self) -> NDArray[np.int64]:
        """Ids of the trajectories that the rows go on with, see :meth:`Path.row_ids`."""
        if self._streams:
            return np.asarray([self.rows[0][0].id if self.rows[0] else -1], np.int64)
        return np.asarray([self._row_id(slot) for slot in range(len(self.slots))], np.int64)

    def _row_id(self, slot: int) -> int:
        row, dialog = self.rows[slot], self.slots[slot]
        if row:
            return row[0].id
        return -1 if dialog is None or dialog.is_untouched else dialog.id

    def num_ahead(self) -> int:
        """Turns that are complete and were not taken."""
        return sum(map(len, self.rows)) + sum(len(dialog.held) for dialog in self.begun)
