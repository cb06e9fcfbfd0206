"""Policies that are called as they are, on tensors or arrays of the entries that they read."""

from rollwright.policies.calls.function import CalledFunction
from rollwright.policies.calls.module import CalledModule

__all__ = ["CalledFunction", "CalledModule"]
