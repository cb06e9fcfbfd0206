"""Modules that draw, and check what they write, at the path that programs of the field import."""

from rollwright.modules.tensordict_module.safe import SafeProbabilisticModule, SafeProbabilisticTensorDictSequential

__all__ = ["SafeProbabilisticModule", "SafeProbabilisticTensorDictSequential"]
