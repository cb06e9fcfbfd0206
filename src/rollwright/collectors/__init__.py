"""Collectors: the loop of policy and environment, and what it delivers."""

from rollwright.collectors.base import BaseCollector
from rollwright.collectors.collector import Collector
from rollwright.collectors.collectors import SyncDataCollector
from rollwright.collectors.evaluation import Evaluator
from rollwright.collectors.interruptor import Interruptor
from rollwright.collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.profiling import ProfileConfig
from rollwright.modules import RandomPolicy

__all__ = [
    "BaseCollector",
    "Collector",
    "CollectorOptions",
    "Evaluator",
    "Interruptor",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "ProfileConfig",
    "RandomPolicy",
    "SyncDataCollector",
]
