"""Collectors whose workers run on a cluster, under the names that the field knows."""
