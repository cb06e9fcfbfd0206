"""Helpers around batches, under the names that programs import from here."""

from rollwright.collectors.base import Interruptor as _Interruptor
from rollwright.collectors.rollout.state import TrajectoryPool as _TrajectoryPool
from rollwright.data.compact import restore_next
from rollwright.data.layout import split_trajectories

__all__ = ["_Interruptor", "_TrajectoryPool", "restore_next", "split_trajectories"]
