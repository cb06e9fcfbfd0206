"""Schedules: when workers collect, and in which order their batches are delivered."""
