"""Environments that are recreated when they fail."""
