"""Environments that step by themselves, at the path that programs of the field import."""

from rollwright.envs.batched.async_pool import AsyncEnvPool

__all__ = ["AsyncEnvPool"]
