"""Transforms that recurrent policies need, at the path that programs of the field import."""

from rollwright.modules.primers import get_env_transforms_from_module, get_primers_from_module

__all__ = ["get_env_transforms_from_module", "get_primers_from_module"]
