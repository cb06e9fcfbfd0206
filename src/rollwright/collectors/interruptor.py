"""Interruptor: stops a rollout between two steps, from outside."""

from __future__ import annotations

import threading

from rollwright._processes.forks import on_fork

__all__ = ["Interruptor"]


class Interruptor:
    """A switch that ends the current rollout after its current step.

    The collector reads it once a step, after the step was taken: an interrupted batch holds at least
    one step, and frames that were not taken have the trajectory id -1.

    Example:
        >>> switch = Interruptor()
        >>> switch.stop_collection()
        >>> switch.collection_stopped()
        True
        >>> switch.start_collection()
        >>> switch.collection_stopped()
        False
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        on_fork(self)

    def reset_after_fork(self) -> None:
        """In a forked child, for the lock inside the event."""
        stopped, self._stopped = self._stopped.is_set(), threading.Event()
        if stopped:
            self._stopped.set()

    def start_collection(self) -> None:
        """Let rollouts run to their end."""
        self._stopped.clear()

    def stop_collection(self) -> None:
        """End the current rollout, and every further one after its first step."""
        self._stopped.set()

    def collection_stopped(self) -> bool:
        """Whether rollouts are to stop."""
        return self._stopped.is_set()
