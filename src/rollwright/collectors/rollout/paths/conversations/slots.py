"""Dialogs: the conversations in the slots of an environment, and their turns that are ready for a batch."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog, EndedTurn, name_of
from rollwright.data.llm.chain import TokenChain
from rollwright.envs.llm.core import Conversations, Opening
from rollwright.envs.llm.undelivered import Undelivered

__all__ = ["Dialogs"]


class Dialogs:
    """Conversations in slots, and rows of turns that are complete and were not taken yet.

    Args:
        conversations: of the environment.
        chain: makes the tokens of a conversation.
        streams: there is one row, of turns in the order in which they end; False: a row for each slot.
        holds: turns wait in their conversation until it has ended: it is delivered whole, from one row.
        fresh_id: hands out trajectory ids.

    Attributes:
        slots: the conversations; None: there is none.
        rows: turns that were not taken.
        undelivered: conversations that nobody got.
        data_is_over: whether a slot found no prompt.
    """

    def __init__(
        self,
        conversations: Conversations,
        chain: Callable[[], TokenChain],
        *,
        streams: bool,
        holds: bool,
        fresh_id: Callable[[], int],
    ) -> None:
        count = conversations.num_slots
        self._conversations, self._chain, self._fresh_id = conversations, chain, fresh_id
        self._streams, self._holds = streams, holds
        self.slots: list[Dialog | None] = [None] * count
        self.rows: list[deque[EndedTurn]] = [deque() for _ in range(1 if streams else count)]
        self.undelivered = Undelivered(conversations)
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
            opening = self.undelivered.open(slot)
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

    def vacate(self) -> None:
        """Have :meth:`fill` begin conversations in all slots that have none."""
        self._vacant.update(slot for slot, dialog in enumerate(self.slots) if dialog is None)

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
        self.undelivered.drop(gone.values())

    def clear(self) -> None:
        """Take all out of slots and rows."""
        self.slots = [None] * len(self.slots)
        self._vacant.clear()
        for row in self.rows:
            row.clear()
        self.data_is_over = False

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
