"""Branches: the token sequences of one conversation, of which one goes on at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.turns import Message


class Branches:
    """The token sequences of a conversation whose environment chooses which one goes on.

    Example:
        >>> chain, branches = TokenChain(None), Branches()
        >>> chain = branches.turn_to(0, chain, torch.tensor([1, 2]))
        >>> chain.answer(torch.tensor([3]))
        tensor([1, 2, 3])
        >>> other = branches.turn_to(1, chain, torch.tensor([7]))
        >>> other.sequence, other.answer(torch.tensor([8]))
        (1, tensor([7, 8]))
        >>> branches.turn_to(0, other, torch.tensor([4])).tokens
        tensor([1, 2, 3, 4])
    """

    def __init__(self) -> None:
        self._all: list[TokenChain] = []

    def turn_to(
        self,
        sequence: int,
        chain: TokenChain,
        messages: Sequence[Message] | torch.Tensor,
        arguments: Mapping[str, Any] | None = None,
    ) -> TokenChain:
        """Go on with a sequence, or begin the next one.

        Args:
            sequence: its number.
            chain: any of the conversation, for tokenizer and template.
            messages: what follows its last answer; of one that begins: all that the model reads.
            arguments: of the chat template, for one that begins.

        Returns:
            Its chain, whose tokens are its next prompt, and whose transcript has its messages so far.

        Raises:
            ValueError: the template does not accept the messages, or the number is neither of one nor the next.
        """
        if not 0 <= sequence <= len(self._all):
            raise ValueError(f"sequence must be at most {len(self._all)}, which begins one; got {sequence}")
        added = [] if isinstance(messages, torch.Tensor) else list(messages)
        if sequence == len(self._all):
            own = chain.new(arguments)
            own.open(messages)
            own.sequence = sequence
            self._all.append(own)
        else:
            own = self._all[sequence]
            own.follow(messages)
        own.transcript.messages.extend(added)
        return own
