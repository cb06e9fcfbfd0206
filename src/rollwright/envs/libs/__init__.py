"""Environments of other packages."""

from rollwright.envs.libs.building import gym_backend, set_gym_backend
from rollwright.envs.libs.dm_control import DMControlEnv, DMControlWrapper
from rollwright.envs.libs.envpool import EnvPoolEnv
from rollwright.envs.libs.gym import BaseInfoDictReader, GymEnv, GymWrapper, default_info_dict_reader
from rollwright.envs.libs.jax_envs import BraxEnv, BraxWrapper, GymnaxEnv, GymnaxWrapper
from rollwright.envs.libs.pettingzoo import PettingZooEnv, PettingZooWrapper
from rollwright.envs.libs.torchrl import TorchRLWrapper, to_torchrl
from rollwright.envs.libs.vmas import VmasEnv, VmasWrapper

__all__ = [
    "BaseInfoDictReader",
    "BraxEnv",
    "BraxWrapper",
    "DMControlEnv",
    "DMControlWrapper",
    "EnvPoolEnv",
    "GymEnv",
    "GymWrapper",
    "GymnaxEnv",
    "GymnaxWrapper",
    "PettingZooEnv",
    "PettingZooWrapper",
    "TorchRLWrapper",
    "VmasEnv",
    "VmasWrapper",
    "default_info_dict_reader",
    "gym_backend",
    "set_gym_backend",
    "to_torchrl",
]
