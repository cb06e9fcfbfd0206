"""Policies and what they are made of."""

from rollwright.modules.random_policy import RandomPolicy

__all__ = ["RandomPolicy"]
