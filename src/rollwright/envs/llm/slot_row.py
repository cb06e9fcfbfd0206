"""SlotRow: the conversation of one row of an environment, with its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.turns import Message
from rollwright.envs.llm.core import Answer, Opening, Outcome

__all__ = ["SlotRow"]


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
