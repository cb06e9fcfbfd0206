"""Collector of dialogues with language models."""
