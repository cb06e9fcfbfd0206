"""Sends weights from a learner to the processes that act."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.weight_update.schemes import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    VLLMWeightSyncScheme,
    WeightSyncScheme,
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
    "VLLMWeightSyncScheme",
    "VanillaWeightUpdater",
    "WeightSyncScheme",
    "WeightUpdaterBase",
]

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        raise missing_name(__name__, name)
