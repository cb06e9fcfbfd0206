"""EnvCreator, at the path that programs of the field import."""

from rollwright.envs.factories import EnvCreator

__all__ = ["EnvCreator"]
