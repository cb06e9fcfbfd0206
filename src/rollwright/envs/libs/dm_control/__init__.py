"""Environments of dm_control, and others with the interface of dm_env."""

from rollwright.envs.libs.dm_control.env import DMControlEnv, DMControlWrapper

__all__ = ["DMControlEnv", "DMControlWrapper"]
