"""Connections between machines: the proof of a secret, and a line for messages and raw memory."""
