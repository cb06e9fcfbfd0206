"""Collectors over RPC, at the path that programs of the field import."""

from rollwright.collectors.clusters.rpc import RPCCollector, RPCDataCollector

__all__ = ["RPCCollector", "RPCDataCollector"]
