"""Replay buffers in a process of their own, which others reach over TCP, on any machine."""

__all__: list[str] = []
