"""The collector over Ray, at the path that programs of the field import."""

from rollwright.collectors.clusters.ray import RayCollector

__all__ = ["RayCollector"]
