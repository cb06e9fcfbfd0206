"""Transforms for conversations with language models."""

from rollwright.envs.llm.transforms.hooks import TurnHook, turn_hooks
from rollwright.envs.llm.transforms.policy_version import PolicyVersion
from rollwright.envs.llm.transforms.reference import KLRewardTransform, RetrieveLogProb
from rollwright.envs.llm.transforms.thinking import AddThinkingPrompt

__all__ = ["AddThinkingPrompt", "KLRewardTransform", "PolicyVersion", "RetrieveLogProb", "TurnHook", "turn_hooks"]
