"""Environments of TorchRL in this library, and those of this library in TorchRL."""

from rollwright.envs.libs.torchrl.wrapper import TorchRLWrapper

__all__ = ["TorchRLWrapper"]
