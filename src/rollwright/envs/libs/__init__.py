"""Environments of other packages."""

from rollwright.envs.libs.backend import gym_backend, set_gym_backend
from rollwright.envs.libs.envpool import EnvPoolEnv
from rollwright.envs.libs.gym import BaseInfoDictReader, GymEnv, GymWrapper, default_info_dict_reader

__all__ = [
    "BaseInfoDictReader",
    "EnvPoolEnv",
    "GymEnv",
    "GymWrapper",
    "default_info_dict_reader",
    "gym_backend",
    "set_gym_backend",
]
