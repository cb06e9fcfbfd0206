"""SlotRow and Slots: conversations in the rows of an environment, with their tokens; Pooled: what a pool asks of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.turns import Message, Origin
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.core import Answer, Conversations, Opening, Outcome, PromptSource
from rollwright.envs.llm.undelivered import Undelivered
from rollwright.errors import EnvError

Name = tuple[int, int]  # of a conversation in a pool: its group in the data of its environment, and its repeat


class SlotRow:
    """The conversation of a row.

    Attributes:
        opening: how it began.
        chain: its tokens; None: it has none.
        messages: so far.
        turn: number of the next one.
        over: whether it has ended.
        resumed: how often it went on after its end.
    """

    def __init__(self, opening: Opening, chain: TokenChain | None) -> None:
        self.opening, self.chain = opening, chain
        self.messages: list[Message] = list(opening.messages)
        self.turn = self.resumed = 0
        self.over = False
        self._text = opening.text or ""

    @property
    def text(self) -> str:
        """Of the next prompt."""
        return self._text if self.chain is None else self.chain.text

    def follow(self, answer: Answer, message: Message, outcome: Outcome) -> None:
        """Take an answer and what follows it."""
        self.turn += 1
        self.over = outcome.terminated or outcome.truncated
        self.messages += [message, *outcome.messages]
        if self.chain is None:
            self._text += answer.text + "".join(str(each.get("content") or "") for each in outcome.messages)
            return
        self.chain.answer(answer.tokens, answer.finish_reason, message)
        if not self.over:
            self.chain.follow(outcome.messages)

    def rewrite(self, messages: list[Message]) -> None:
        """Go on from other messages: a new sequence of the same conversation."""
        self.messages = list(messages)
        if self.chain is not None:
            before, self.chain = self.chain, self.chain.new()
            self.chain.open(messages)
            self.chain.sequence = before.sequence + 1

    def resume(self, messages: list[Message]) -> None:
        """Go on after the end."""
        self.over = False
        self.resumed += 1
        self.messages += messages
        if self.chain is None:
            self._text += "".join(str(each.get("content") or "") for each in messages)
        else:
            self.chain.follow(messages)

    def state_dict(self, conversation: Mapping[str, Any]) -> dict[str, Any]:
        """What it needs to go on.

        Args:
            conversation: what its environment needs, see :meth:`Conversations.state`.
        """
        return {
            "opening": self.opening,
            "chain": None if self.chain is None else self.chain.state_dict(),
            "messages": list(self.messages),
            "turn": self.turn,
            "resumed": self.resumed,
            "over": self.over,
            "text": self._text,
            "conversation": dict(conversation),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` saved."""
        if self.chain is not None and state_dict["chain"] is not None:
            self.chain.load_state_dict(state_dict["chain"])
        self.messages = list(state_dict["messages"])
        self.turn, self.resumed, self.over = state_dict["turn"], state_dict["resumed"], state_dict["over"]
        self._text = state_dict["text"]


class Slots:
    """The conversations of all rows, and those that begin next.

    Args:
        conversations: what they are made of.
        chain: makes the tokens of a conversation that begins; None: it has none.

    Attributes:
        rows: of the slots; None: none was begun.
        vacant: slots that the data has no conversation for.
        undelivered: conversations that nobody got.
    """

    def __init__(self, conversations: Conversations, chain: Callable[[Opening], TokenChain | None]) -> None:
        self._conversations, self._chain = conversations, chain
        self.rows: list[SlotRow | None] = [None] * conversations.num_slots
        self.vacant: set[int] = set()
        self.undelivered = Undelivered(conversations)

    def open(self, slot: int) -> None:
        """Begin the next conversation, unless nothing was answered in the one that is there.

        One that is in progress is dropped, and its prompt counts as delivered.

        Raises:
            EnvError, ValueError: its prompt cannot be read; names the conversation.
        """
        row = None if slot in self.vacant else self.rows[slot]
        if row is not None and not row.turn:
            return
        if row is not None and not row.over:
            self.undelivered.drop([row.opening])
        try:
            opening = self.undelivered.open(slot)
        except StopIteration:
            self.vacant.add(slot)
            return
        if opening.error is not None:
            raise opening.error
        self.vacant.discard(slot)
        self.rows[slot] = self._row(opening)

    def renew(self) -> None:
        """End what is in progress, and begin the next conversations; the next reset shows them."""
        for slot in range(len(self.rows)):
            self.open(slot)

    def begin(self, slot: int, opening: Opening) -> None:
        """Begin a conversation that the caller chose; the one that is there counts as delivered.

        Raises:
            EnvError, ValueError: its prompt cannot be read; names the conversation.
        """
        row = None if slot in self.vacant else self.rows[slot]
        if row is not None and row.over:
            self.source.delivered(row.opening.draw.origin)
        elif row is not None:
            self.undelivered.drop([row.opening])
        self.vacant.discard(slot)
        self._conversations.load(slot, opening, opening.messages, {})
        self.rows[slot] = self._row(opening)

    def _row(self, opening: Opening) -> SlotRow:
        try:
            return SlotRow(opening, self._chain(opening))
        except ValueError as error:
            raise ValueError(f"the conversation of {opening.draw.origin.name}, turn 0: {error}") from error

    def shown(self, slot: int) -> SlotRow:
        """The conversation that a row shows: its own, or another one where its slot is vacant."""
        if slot not in self.vacant:
            return cast(SlotRow, self.rows[slot])
        live = (row for other, row in enumerate(self.rows) if row is not None and other not in self.vacant)
        return next(live, None) or self.rows[slot] or next(row for row in self.rows if row is not None)

    @property
    def source(self) -> PromptSource:
        """Hands out prompts."""
        return self._conversations.source

    @property
    def openings(self) -> list[Opening | None]:
        """How the conversations began; None: none was, or the data is over."""
        return [None if row is None or slot in self.vacant else row.opening for slot, row in enumerate(self.rows)]

    @property
    def in_progress(self) -> list[bool]:
        """Whether the conversations have an answer, and go on."""
        return [
            row is not None and slot not in self.vacant and row.turn > 0 and not row.over
            for slot, row in enumerate(self.rows)
        ]

    @property
    def is_over(self) -> bool:
        """Whether all slots are vacant."""
        return len(self.vacant) == len(self.rows)

    def abandon(self) -> None:
        """Forget all conversations in progress, and those to begin again."""
        self.interrupted()
        self.undelivered.again.clear()

    def interrupted(self) -> list[Opening]:
        """Take the conversations out of their slots; returns those that have not ended."""
        shown = zip(self.rows, self.openings, strict=True)
        found = [opening for row, opening in shown if row is not None and opening is not None and not row.over]
        self._conversations.clear()
        self.rows = [None] * len(self.rows)
        self.vacant.clear()
        return found

    def state(self) -> dict[str, Any]:
        """What all need to go on.

        Raises:
            EnvError: a conversation cannot be saved, and why.
        """
        rows: list[Any] = []
        for slot, row in enumerate(self.rows):
            if row is None or slot in self.vacant:
                rows.append(None)
            else:
                rows.append(row.state_dict({} if row.over else self._conversations.state(slot)))
        return {
            "rows": rows,
            "vacant": sorted(self.vacant),
            "again": list(self.undelivered.again),
            "dropped": self.undelivered.num_dropped,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state` gave."""
        for slot, row in enumerate(state["rows"]):
            if row is None:
                continue
            loaded = self.rows[slot] = SlotRow(row["opening"], self._chain(row["opening"]))
            loaded.load_state_dict(row)
            self._conversations.load(slot, loaded.opening, loaded.messages, row["conversation"])
        self.vacant.update(state["vacant"])
        self.undelivered.load_again(state["again"], state["dropped"])

    def go_back(self, state: Mapping[str, Any], taken: Iterable[Opening]) -> None:
        """Go on from an earlier state.

        Args:
            state: of :meth:`state`.
            taken: conversations that steps were taken in since then; they begin again, if they were not there then.
        """
        known = {row["opening"].draw.origin for row in state["rows"] if row is not None}
        known |= {opening.draw.origin for opening in state["again"]}
        since = [*taken, *self.interrupted(), *self.undelivered.again]
        self.load(state)
        self.undelivered.begin_again(opening for opening in since if opening.draw.origin not in known)


class Pooled:
    """Methods of an environment of one conversation that a pool calls, in whatever process the environment is.

    Conversations are kept, by name, until the pool says that they were delivered: it has no prompts.
    """

    _slots: Slots
    _kept: dict[Name, Opening] | None = None  # those that have ended, or were taken out; None: no pool has asked yet

    def _note_end(self, opening: Opening) -> None:
        if self._kept is not None:
            self._kept[_name(opening)] = opening

    def begin_conversation(self, name: Name | None = None) -> bool:
        """Begin the next conversation, or the one that is named; whether there is any."""
        kept = self._known
        if name is None:
            self._slots.open(0)
        else:
            self._slots.begin(0, kept[name])
        return not self._slots.is_over

    @property
    def _known(self) -> dict[Name, Opening]:
        if self._kept is None:
            self._kept = {}
        return self._kept

    def take_out(self, back: bool) -> None:
        """Take the conversation that is there out; ``back``: nobody has asked for it, and it is the next one."""
        found = self._slots.interrupted()
        self._known.update((_name(opening), opening) for opening in found)
        if back:
            self._slots.undelivered.begin_again(found)

    def note(self, delivered: Iterable[Name], claimed: Iterable[Name]) -> None:
        """What has come of conversations: those that count as delivered, and those that the data is not to give."""
        for name in delivered:
            self._slots.source.delivered(self._origin(name))
            self._known.pop(name, None)
        for name in claimed:
            self._slots.source.claim(self._origin(name))

    def _origin(self, name: Name) -> Origin:
        """Where a conversation comes from."""
        there = [*(opening for opening in self._slots.openings if opening is not None), *self._known.values()]
        found = next((opening.draw.origin for opening in there if _name(opening) == name), None)
        return found or Origin(0, 0, name[1], name[0], getattr(self._slots.source, "seed", 0))

    def save_place(self) -> dict[str, Any]:
        """The place in the data, and the conversations that are kept."""
        return {"source": self._slots.source.state_dict(), "kept": dict(self._known)}

    def save_conversation(self) -> tuple[dict[str, Any], torch.Tensor | None, str | None]:
        """The place in the data, and the conversation in progress; or why it cannot be saved."""
        place = self.save_place()
        try:
            return place, packed(self._slots.state()), None
        except EnvError as error:
            return place, None, str(error)
        except Exception as error:
            return place, None, f"{type(error).__name__}: {error}"

    def load_place(self, place: Mapping[str, Any]) -> None:
        """Go on from what :meth:`save_place` saved; what is in progress is forgotten."""
        self._slots.abandon()
        self._slots.source.load_state_dict(place["source"])
        self._kept = dict(place["kept"])

    def load_conversation(self, progress: torch.Tensor) -> None:
        """Go on with the conversation that :meth:`save_conversation` saved."""
        self._slots.load(unpacked(progress))

    @property
    def repeats(self) -> int:
        """Conversations of a group."""
        return int(getattr(self._slots.source, "repeats", 1))

    def share_data(self, index: int, count: int) -> None:
        """Hand out each ``count``-th group only, from ``index`` on; before the first draw."""
        self._slots.source.shard(index, count)


def _name(opening: Opening) -> Name:
    return opening.draw.origin.group, opening.draw.origin.repeat
