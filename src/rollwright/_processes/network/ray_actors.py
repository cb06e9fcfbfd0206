"""What runs in actors of Ray: one process, which they end with, or an object.

Ray imports this module in each actor, so it imports no torch: the process, which a fork server of the actor's own
forks, has it.
"""

from __future__ import annotations

import importlib
import logging
import os
from multiprocessing.connection import wait
from typing import Any

from rollwright._processes.channel import ByValue, Channel, ChannelClosed
from rollwright._processes.child import Child
from rollwright._processes.connection import NOTHING
from rollwright._processes.failures import ExceptionInfo

_NAP_S = 1.0
_END_S = 5.0
_log = logging.getLogger("rollwright")


class ProcessActor:
    """Runs a function in a process of its own, for as long as that takes."""

    def run(self, target: str, args: tuple[Any, ...], niceness: int | None) -> None:
        """Run a function to its end.

        Args:
            target: ``"module:function"``.
            args: for it.
            niceness: of the process, and of those that it starts; None: that of the actor.

        Raises:
            WorkerError: it raised; an instance of what it raised, too.
            RuntimeError: its process has ended otherwise.
        """
        if niceness is not None:
            try:
                os.setpriority(os.PRIO_PROCESS, 0, niceness)
            except OSError as error:
                _log.warning("niceness=%d: %s; it stays %d", niceness, error.strerror, os.nice(0))
        child = Child(_call, target, args, name=f"rollwright-{target.rpartition(':')[2]}")
        try:
            failure = None
            while child.alive and failure is None:
                wait(child.filenos(), _NAP_S)
                failure = _failure(child)
            failure = failure or _failure(child)
            if failure is not None:
                raise failure.error(f"Ray actor on {os.uname().nodename}")
            child.wait(_END_S)
            if child.how_it_ended() != "exited with status 0":
                raise RuntimeError(f"its process {child.how_it_ended()}")
        finally:
            child.channel.close()
            child.end(_END_S)


def _failure(child: Child) -> ExceptionInfo | None:
    try:
        message = child.take()
    except ChannelClosed:
        child.wait(_END_S)
        return None
    return message if message is not NOTHING and isinstance(message, ExceptionInfo) else None


def _call(channel: Channel, target: str, args: tuple[Any, ...]) -> None:
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(*args)


class ObjectActor:
    """An object whose methods are called, in the actor's own process.

    Args:
        init_fn: called first, before anything of the object is imported.
        target: ``"module:class"`` of the object.
        args: for its constructor.
    """

    def __init__(self, init_fn: ByValue, target: str, args: ByValue) -> None:
        if init_fn.value is not None:
            init_fn.value()
        module, _, name = target.partition(":")
        self._object = getattr(importlib.import_module(module), name)(*args.value)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*args)
