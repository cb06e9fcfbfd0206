"""Environments of conversations with language models."""
