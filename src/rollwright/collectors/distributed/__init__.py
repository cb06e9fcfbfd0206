"""Collectors whose workers run on a cluster, where programs of the field import them from."""

from rollwright.collectors.clusters.ray import RayCollector

__all__ = ["RayCollector"]
