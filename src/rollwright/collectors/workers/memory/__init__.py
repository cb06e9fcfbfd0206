"""Shared memory between a collector and its workers."""
