"""Processes: how they are started, exchange messages, report errors, and end."""
