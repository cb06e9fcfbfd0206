"""Sends weights from a learner to the processes that act."""

from __future__ import annotations

from rollwright.weight_update._scheme import WeightSyncScheme
from rollwright.weight_update.schemes import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from rollwright.weight_update.updaters import (
    LocalWeightsUpdaterBase,
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
    RemoteWeightsUpdaterBase,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "DistributedWeightSyncScheme",
    "LocalWeightsUpdaterBase",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayWeightSyncScheme",
    "RemoteModuleWeightUpdater",
    "RemoteWeightsUpdaterBase",
    "SharedMemWeightSyncScheme",
    "VanillaWeightUpdater",
    "WeightSyncScheme",
    "WeightUpdaterBase",
]
