"""Batches of environments, at the path that programs of the field import."""

from rollwright.envs.batched.parallel import ParallelEnv
from rollwright.envs.serial import SerialEnv

__all__ = ["ParallelEnv", "SerialEnv"]
