"""Collectors over process groups, at the path that programs of the field import."""

from rollwright.collectors.clusters.distributed import DistributedCollector, DistributedDataCollector

__all__ = ["DistributedCollector", "DistributedDataCollector"]
