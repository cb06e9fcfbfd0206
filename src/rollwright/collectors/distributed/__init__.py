"""Collectors whose workers run on a cluster, where programs of the field import them from."""

from rollwright.collectors.clusters.distributed import (
    DistributedCollector,
    DistributedDataCollector,
    DistributedSyncCollector,
    DistributedSyncDataCollector,
)
from rollwright.collectors.clusters.ray import RayCollector
from rollwright.collectors.clusters.ray_evaluation import RayEvalWorker
from rollwright.collectors.clusters.rpc import RPCCollector, RPCDataCollector

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
