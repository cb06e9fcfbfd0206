"""Engines that generate by themselves: vLLM in a process of its own, servers at an address, replicas of these."""
