"""Synchronous collectors over process groups, at the path that programs of the field import."""

from rollwright.collectors.clusters.distributed import DistributedSyncCollector, DistributedSyncDataCollector

__all__ = ["DistributedSyncCollector", "DistributedSyncDataCollector"]
