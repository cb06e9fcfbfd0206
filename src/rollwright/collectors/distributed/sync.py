"""Synchronous collectors over process groups, at the path that programs of the field import."""

from rollwright.collectors.distributed.generic import DistributedSyncCollector, DistributedSyncDataCollector

__all__ = ["DistributedSyncCollector", "DistributedSyncDataCollector"]
