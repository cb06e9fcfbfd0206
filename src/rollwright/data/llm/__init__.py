"""Conversations with language models: turns, chat histories, ragged records."""

from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.chat_template import ChatTemplate
from rollwright.data.llm.turns import FinishReason, Message, Origin, Turn, turn_seed

__all__ = ["ChatTemplate", "FinishReason", "Message", "Origin", "TokenChain", "Turn", "turn_seed"]
