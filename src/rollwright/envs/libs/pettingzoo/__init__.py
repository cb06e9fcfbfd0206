"""Environments of PettingZoo."""

from rollwright.envs.libs.pettingzoo.env import PettingZooEnv, PettingZooWrapper
from rollwright.envs.libs.pettingzoo.groups import MarlGroupMapType

__all__ = ["MarlGroupMapType", "PettingZooEnv", "PettingZooWrapper"]
