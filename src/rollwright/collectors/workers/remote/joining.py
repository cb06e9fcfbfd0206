"""Joining: what a machine does that is to run workers of a collector elsewhere."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from rollwright._processes.network.handshake import RefusedForNow, connect_to
from rollwright._processes.network.line import Line
from rollwright.collectors.workers.remote.group import serve_collector

_NAP_S = 0.2


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
        timeout_s: for the collector to listen, to answer, and to have a place: it is asked again until then.

    Raises:
        HandshakeRefused: the collector has another secret, or does not want this host.
        ConnectionError, TimeoutError: nothing answers there.
    """
    about = {"group": group, "name": name or socket.gethostname(), "cores": len(os.sched_getaffinity(0))}
    line = _let_in(address, secret, about, timeout_s)
    try:
        serve_collector(line)
    finally:
        line.close()


def _let_in(address: tuple[str, int], secret: bytes, about: dict[str, Any], timeout_s: float) -> Line:
    until = time.monotonic() + timeout_s
    while True:
        try:
            return connect_to(address, secret, about, max(_NAP_S, until - time.monotonic()))
        except RefusedForNow:
            if time.monotonic() + _NAP_S > until:
                raise
            time.sleep(_NAP_S)
