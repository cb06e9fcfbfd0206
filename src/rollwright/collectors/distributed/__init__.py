"""Collectors whose workers run on a cluster, where programs of the field import them from."""

from rollwright.collectors.distributed.generic import (
    DistributedCollector,
    DistributedDataCollector,
    DistributedSyncCollector,
    DistributedSyncDataCollector,
)
from rollwright.collectors.distributed.ray import RayCollector
from rollwright.collectors.distributed.rpc import RPCCollector, RPCDataCollector
from rollwright.collectors.evaluation.ray import RayEvalWorker

__all__ = [
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "RPCCollector",
    "RPCDataCollector",
    "RayCollector",
    "RayEvalWorker",
]
