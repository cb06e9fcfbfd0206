"""Environments of conversations with language models."""

from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.envs.llm.agents import AgentEnv, Command
from rollwright.envs.llm.chat import ChatEnv, DatasetChatEnv
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.core import Answer, Conversations, NextTurn, Opening, Outcome, PromptDraw, PromptSource
from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.llm.envs import LLMEnv
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue, Environment
from rollwright.envs.llm.rewards import Reward
from rollwright.envs.llm.sources import DatasetSource
from rollwright.envs.llm.tools import (
    FunctionTool,
    JSONToolParser,
    ParsedAnswer,
    PythonInterpreter,
    TemplateToolParser,
    Tool,
    ToolCall,
    ToolParser,
    ToolSession,
    Toolset,
    XMLToolParser,
)
from rollwright.envs.llm.transforms import AddThinkingPrompt, KLRewardTransform, PolicyVersion, RetrieveLogProb

__all__ = [
    "AddThinkingPrompt",
    "AgentEnv",
    "Answer",
    "ChatEnv",
    "Command",
    "ConversationEnv",
    "Conversations",
    "DatasetChatEnv",
    "DatasetConversations",
    "DatasetSource",
    "Dialogue",
    "Environment",
    "FunctionTool",
    "JSONToolParser",
    "KLRewardTransform",
    "LLMEnv",
    "NextTurn",
    "Opening",
    "Outcome",
    "ParsedAnswer",
    "PolicyVersion",
    "PromptDraw",
    "PromptFormat",
    "PromptSource",
    "PythonInterpreter",
    "RetrieveLogProb",
    "Reward",
    "TemplateToolParser",
    "Tool",
    "ToolCall",
    "ToolParser",
    "ToolSession",
    "Toolset",
    "XMLToolParser",
]

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        raise missing_name(__name__, name)
