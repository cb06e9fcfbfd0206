"""Collectors whose workers run on a cluster, under the names that the field knows."""

__all__: list[str] = []
