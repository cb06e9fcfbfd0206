"""Conversations with language models: turns, chat histories, ragged records."""

from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.chat_template import ChatTemplate
from rollwright.data.llm.history import ChatHistory, History
from rollwright.data.llm.ragged import as_list, as_nested, flat_records, packed, padded
from rollwright.data.llm.records import RecordLayout, empty_record, record, records, stack_records
from rollwright.data.llm.sequence import (
    group_advantages,
    importance_weights,
    pass_at_k,
    rewards_differ,
    training_sequences,
)
from rollwright.data.llm.trace import Trace, TracedConversation, TraceWriter
from rollwright.data.llm.turns import FinishReason, Message, Origin, Turn, turn_seed

__all__ = [
    "ChatHistory",
    "ChatTemplate",
    "FinishReason",
    "History",
    "Message",
    "Origin",
    "RecordLayout",
    "TokenChain",
    "Trace",
    "TraceWriter",
    "TracedConversation",
    "Turn",
    "as_list",
    "as_nested",
    "empty_record",
    "flat_records",
    "group_advantages",
    "importance_weights",
    "packed",
    "padded",
    "pass_at_k",
    "record",
    "records",
    "rewards_differ",
    "stack_records",
    "training_sequences",
    "turn_seed",
]
