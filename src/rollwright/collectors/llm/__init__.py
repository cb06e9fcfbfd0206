"""Collector of dialogues with language models."""

from rollwright.collectors.llm.collector import LLMCollector

__all__ = ["LLMCollector"]
