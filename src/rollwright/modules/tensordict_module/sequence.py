"""The sequence that checks what it writes, at the path that programs of the field import."""

from rollwright.modules.tensordict_module.safe import SafeSequential

__all__ = ["SafeSequential"]
