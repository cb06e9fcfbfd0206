"""Collector of dialogues with language models."""

from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.collectors.llm.collector import LLMCollector
from rollwright.collectors.llm.ray_collector import RayLLMCollector
from rollwright.weight_update.updaters import vLLMUpdater, vLLMUpdaterV2

__all__ = ["LLMCollector", "RayLLMCollector", "vLLMUpdater", "vLLMUpdaterV2"]

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        raise missing_name(__name__, name)
