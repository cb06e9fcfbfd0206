"""Transforms, at the path that programs of the field import."""

from rollwright.envs.transforms import *  # noqa: F403 - all of them
from rollwright.envs.transforms import __all__ as __all__
