"""Pooled: what a pool asks of an environment of conversations in it, by name and with plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollwright.data.llm.turns import Origin
from rollwright.envs.checkpoint.packed import packed, unpacked
from rollwright.envs.llm.core import Opening
from rollwright.envs.llm.slot_row import Slots
from rollwright.envs.llm.undelivered import Undelivered

__all__ = ["Name", "Pooled"]

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

    def note(self, delivered: Iterable[Name], dropped: Iterable[Name]) -> None:
        """What has come of conversations that have ended: they were delivered, or dropped on purpose."""
        self._undelivered.delivered(delivered)
        self._undelivered.drop(self._undelivered.take(dropped))

    def next_conversation(self) -> bool:
        """Begin the next conversation, unless nothing was answered in the one that is there; whether there is any."""
        self._slots.open(0)
        return not self._slots.is_over

    def begin_again(self, held: Iterable[Name] | None, ends: bool = False) -> None:
        """Begin the conversation in progress again; and those that have ended.

        Args:
            held: those that are delivered none the less; None: all.
            ends: end the conversation in progress instead, on purpose.
        """
        undelivered, found = self._undelivered, self._slots.interrupted()
        kept = undelivered.openings if held is None else {name: undelivered.openings[name] for name in held}
        others = [opening for name, opening in undelivered.openings.items() if name not in kept]
        undelivered.go_back(kept)
        if ends:
            undelivered.drop(opening for opening in found if _name(opening) not in kept)
            found = []
        undelivered.begin_again([*others, *(opening for opening in found if _name(opening) not in kept)])

    def forget_conversations(self) -> None:
        """Draw others; nothing begins again."""
        self._slots.abandon()
        self._undelivered.forget()

    def save_conversation(self) -> tuple[dict[str, Any], str | None]:
        """The place in the data, what nobody got, and the conversation in progress; or why it begins again."""
        source = self._slots.source.state_dict()
        state = {"source": source, **self._undelivered.state_dict(), "progress": None}
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
        source = self._slots.source
        source.load_state_dict(state["source"])
        for group, repeat in delivered:
            source.delivered(Origin(0, 0, repeat, group, state["source"]["seed"]))
        source.load_state_dict(source.state_dict())  # groups are as large as what is left of them
        if state["progress"] is None:
            self._undelivered.load_again(unpacked(state["again"]), state["dropped"])
        else:
            self._slots.load(unpacked(state["progress"]))
        ended = unpacked(state["undelivered"])
        self._undelivered.load_ended({name: ended[name] for name in ended.keys() - set(delivered)})

    @property
    def repeats(self) -> int:
        """Conversations of a group."""
        return int(getattr(self._slots.source, "repeats", 1))

    def share_data(self, index: int, count: int) -> None:
        """See :meth:`PromptSource.shard`."""
        self._slots.source.shard(index, count)


def _name(opening: Opening) -> Name:
    return opening.draw.origin.group, opening.draw.origin.repeat
