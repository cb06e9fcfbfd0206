"""Collectors: the loop of policy and environment, and what it delivers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.collectors.base import BaseCollector, Interruptor
from rollwright.collectors.collector import Collector
from rollwright.collectors.collectors import SyncDataCollector
from rollwright.collectors.evaluation import Evaluator
from rollwright.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.profiling import ProfileConfig
from rollwright.collectors.reports.statistics import CollectorStats
from rollwright.modules import RandomPolicy
from rollwright.weight_update import WeightUpdaterBase

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "CollectorOptions",
    "CollectorStats",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedSyncDataCollector",
    "Evaluator",
    "Interruptor",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "ProfileConfig",
    "RPCCollector",
    "RPCDataCollector",
    "RandomPolicy",
    "RayCollector",
    "RayEvalWorker",
    "SyncDataCollector",
    "WeightUpdaterBase",
]

if TYPE_CHECKING:
    from rollwright.collectors.clusters.distributed import (
        DistributedCollector,
        DistributedDataCollector,
        DistributedSyncCollector,
        DistributedSyncDataCollector,
    )
    from rollwright.collectors.clusters.ray import RayCollector
    from rollwright.collectors.clusters.ray_evaluation import RayEvalWorker
    from rollwright.collectors.clusters.rpc import RPCCollector, RPCDataCollector
else:
    _OF_CLUSTERS = {  # by name, the module: imported when it is used
        "DistributedCollector": "rollwright.collectors.clusters.distributed",
        "DistributedDataCollector": "rollwright.collectors.clusters.distributed",
        "DistributedSyncCollector": "rollwright.collectors.clusters.distributed",
        "DistributedSyncDataCollector": "rollwright.collectors.clusters.distributed",
        "RayCollector": "rollwright.collectors.clusters.ray",
        "RPCCollector": "rollwright.collectors.clusters.rpc",
        "RPCDataCollector": "rollwright.collectors.clusters.rpc",
        "RayEvalWorker": "rollwright.collectors.clusters.ray_evaluation",
    }

    def __getattr__(name: str) -> object:
        if name not in _OF_CLUSTERS:
            raise missing_name(__name__, name)
        return getattr(import_module(_OF_CLUSTERS[name]), name)
