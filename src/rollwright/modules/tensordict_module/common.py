"""The module that checks what it writes, at the path that programs of the field import."""

from rollwright.modules.tensordict_module.safe import SafeModule

__all__ = ["SafeModule"]
