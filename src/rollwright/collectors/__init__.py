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
from rollwright.collectors.reports.observers import ProfileConfig
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
    from rollwright.collectors.distributed.generic import (
        DistributedCollector,
        DistributedDataCollector,
        DistributedSyncCollector,
        DistributedSyncDataCollector,
    )
    from rollwright.collectors.distributed.ray import RayCollector
    from rollwright.collectors.distributed.rpc import RPCCollector, RPCDataCollector
    from rollwright.collectors.evaluation.ray import RayEvalWorker
else:
    _OF_CLUSTERS = {  # by name, the module: imported when it is used
        "DistributedCollector": "rollwright.collectors.distributed.generic",
        "DistributedDataCollector": "rollwright.collectors.distributed.generic",
        "DistributedSyncCollector": "rollwright.collectors.distributed.generic",
        "DistributedSyncDataCollector": "rollwright.collectors.distributed.generic",
        "RayCollector": "rollwright.collectors.distributed.ray",
        "RPCCollector": "rollwright.collectors.distributed.rpc",
        "RPCDataCollector": "rollwright.collectors.distributed.rpc",
        "RayEvalWorker": "rollwright.collectors.evaluation.ray",
    }

    def __getattr__(name: str) -> object:
        if name not in _OF_CLUSTERS:
            raise missing_name(__name__, name)
        return getattr(import_module(_OF_CLUSTERS[name]), name)
