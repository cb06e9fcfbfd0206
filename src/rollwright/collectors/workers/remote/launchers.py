"""Launchers: what starts the processes of remote groups."""

from __future__ import annotations

import contextlib
import socket
from typing import Protocol

from rollwright._processes.channel import Channel, ChannelClosed
from rollwright._processes.child import Child
from rollwright._processes.connection import end_all
from rollwright._processes.failures import ExceptionInfo
from rollwright.collectors.workers.remote.joining import join


class Host(Protocol):
    """A process that was started to run a remote group."""

    def how_it_ended(self) -> str | None:
        """A phrase; None: it runs, as far as is known. To be asked now and then: it does not wait."""

    def end(self, timeout_s: float) -> None:
        """Make it end, if it has not ended by itself within a while."""


class Launcher(Protocol):
    """Starts hosts. Nothing here waits."""

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> Host | None:
        """Start the process of a group, which joins the collector at an address.

        Returns:
            The host; None: somebody else starts it.
        """


class LocalLauncher:
    """Starts groups in processes of this machine that share nothing with the collector."""

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> Host:
        """See :class:`Launcher`."""
        return _LocalHost(Child(_join, address, secret, group, name=f"rollwright-host-{group}"))


class Manual:
    """Leaves it to the user to start groups: ``rollwright join HOST:PORT``."""

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> None:
        """See :class:`Launcher`."""


class _LocalHost:
    def __init__(self, child: Child) -> None:
        self._child = child

    def how_it_ended(self) -> str | None:
        if self._child.alive:
            return None
        with contextlib.suppress(ChannelClosed):
            message = self._child.take()
            if isinstance(message, ExceptionInfo):
                return f"has failed: {message.error('it', 0)}"
        return self._child.how_it_ended()

    def end(self, timeout_s: float) -> None:
        self._child.channel.close()
        end_all([self._child], timeout_s)


def _join(channel: Channel, address: tuple[str, int], secret: bytes, group: int) -> None:
    join(address, secret, group=group, name=f"{socket.gethostname()} (group {group})")
