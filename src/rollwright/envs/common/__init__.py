"""The base class of environments, at the path that programs of the field import."""

from rollwright.envs.base import EnvBase

__all__ = ["EnvBase"]
