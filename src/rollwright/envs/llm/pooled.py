"""Pooled: what a pool asks of an environment of conversations in it, by name and with plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollwright.data.llm.turns import Origin
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.core import Opening
from rollwright.envs.llm.slot_row import Slots
from rollwright.envs.llm.undelivered import Undelivered

Name = tuple[int, int]  # of a conversation: its group in the data of its environment, and its repeat


class Pooled:
    """Methods of an environment of one conversation that a pool calls, in whatever process the environment is.

    The conversations that have ended are kept, by name, until they are said to be delivered or dropped.
    """

    _slots: Slots
    _keeps_ended = False

    def _note_end(self, opening: Opening) -> None:
        if self._keeps_ended:
            self._undelivered.ended({**self._undelivered.openings, _name(opening): opening})

    def _note_resumption(self, opening: Opening) -> None:
        if self._keeps_ended:
            self._undelivered.take([_name(opening)])

    @property
    def _undelivered(self) -> Undelivered:
        return self._slots.undelivered

    def keep_ended(self) -> None:
        """Keep conversations that have ended from now on, until one of the following names them."""
        self._keeps_ended = True

    def note(self, delivered: Iterable[Name], again: Iterable[Name]) -> None:
        """What has come of conversations.

        Args:
            delivered: those that count as delivered; one of them that is in progress ends.
            again: those that begin again; where there are any, what is in progress does, too.
        """
        done, again = set(delivered), list(again)
        self._undelivered.delivered(done)
        slots = zip(self._slots.openings, self._slots.in_progress, strict=True)
        if again or any(goes_on and opening is not None and _name(opening) in done for opening, goes_on in slots):
            found = self._slots.interrupted()
            self._undelivered.drop(opening for opening in found if _name(opening) in done)
            left = [opening for opening in found if _name(opening) not in done]
            self._undelivered.begin_again([*self._undelivered.take(again), *left])

    def next_conversation(self) -> bool:
        """Begin the next conversation, unless nothing was answered in the one that is there; whether there is any."""
        self._slots.open(0)
        return not self._slots.is_over

    def forget_conversations(self) -> None:
        """Draw others; nothing begins again."""
        self._slots.abandon()
        self._undelivered.forget()

    def save_conversation(self) -> tuple[dict[str, Any], str | None]:
        """The place in the data, what nobody got, and the conversation in progress; or why it begins again."""
        state = {**self._undelivered.state_dict(), "progress": None}
        try:
            return {**state, "progress": packed(self._slots.state())}, None
        except Exception as error:
            return state, f"{type(error).__name__}: {error}"

    def load_conversation(self, state: Mapping[str, Any], delivered: Iterable[Name] = ()) -> None:
        """Go on from what :meth:`save_conversation` saved.

        Args:
            state: see there.
            delivered: conversations that had ended and were delivered none the less.
        """
        self.forget_conversations()
        done = [Origin(0, 0, repeat, group, state["source"]["seed"]) for group, repeat in delivered]
        self._undelivered.load_state_dict(state, delivered=done)
        if state["progress"] is not None:
            self._slots.load(unpacked(state["progress"]))

    @property
    def repeats(self) -> int:
        """Conversations of a group."""
        return int(getattr(self._slots.source, "repeats", 1))

    def share_data(self, index: int, count: int) -> None:
        """See :meth:`PromptSource.shard`."""
        self._slots.source.shard(index, count)


def _name(opening: Opening) -> Name:
    return opening.draw.origin.group, opening.draw.origin.repeat
