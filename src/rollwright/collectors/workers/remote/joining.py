"""Joining: what a machine does that is to run workers of a collector elsewhere."""

from __future__ import annotations

import os
import socket

from rollwright._processes.network.handshake import connect_to
from rollwright._processes.network.line import Line
from rollwright.collectors.workers.remote.group import serve_collector

__all__ = ["join"]


def join(
    address: tuple[str, int],
    secret: bytes,
    *,
    group: int | None = None,
    name: str | None = None,
    timeout_s: float = 20.0,
) -> None:
    """Run workers of a collector until it hangs up, or its machine is gone.

    Args:
        address: host and port where the collector listens.
        secret: of its run.
        group: which group this is; None: any that nobody has joined.
        name: of this machine, for messages; None: its host name.
        timeout_s: for the collector to listen and to answer.

    Raises:
        HandshakeRefused: the collector has another secret, or does not want this host.
        ConnectionError, TimeoutError: nothing answers there.
    """
    about = {"group": group, "name": name or socket.gethostname(), "cores": len(os.sched_getaffinity(0))}
    line = Line(connect_to(address, secret, about, timeout_s))
    try:
        serve_collector(line)
    finally:
        line.close()
