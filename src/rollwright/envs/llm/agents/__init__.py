"""Programs that own their loop: an OpenAI-compatible address for each conversation."""

from rollwright.envs.llm.agents.env import AgentEnv
from rollwright.envs.llm.agents.programs import Command

__all__ = ["AgentEnv", "Command"]
