"""Sessions with a Ray cluster, which several objects of a program share: the last one to close it disconnects."""

from __future__ import annotations

import inspect
import math
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from rollwright._options import refuse_unknown
from rollwright.errors import require

_ANSWER_S = 5.0
_lock = threading.Lock()
_open: set[RaySession] = set()
_is_ours = False  # whether a session has connected this process


class RaySession:
    """A connection of this process to a Ray cluster.

    Where the program is connected already (``ray.init()``), it uses that, and leaves it as it is. Otherwise it attaches
    to a cluster by address, or starts one on this machine.

    Args:
        config: arguments of ``ray.init``; None: none. Without an address, here and in ``RAY_ADDRESS``, and without a
            cluster that was started on this machine, a local one is started.
        num_cpus: that a cluster has at least if it is started here, and ``config`` does not say how many.
        purpose: what needs Ray, for messages.

    Attributes:
        ray: the module.
        node_ip: address of this machine, as the cluster knows it.

    Raises:
        MissingExtraError: Ray is not installed.
        TypeError, ValueError: ``config`` is wrong.
        ConnectionError: nothing answers at its address.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, *, num_cpus: float = 0, purpose: str) -> None:
        global _is_ours
        self.ray: Any = require("ray", extra="ray", purpose=purpose)
        self._home = os.getpid()
        known = [name for name in inspect.signature(self.ray.init).parameters if name != "kwargs"]
        refuse_unknown([name for name in config or {} if not name.startswith("_")], known, "ray_init_config")
        with _lock:
            if self.ray.is_initialized():
                self._check_address(config or {})
            else:
                _connect(self.ray, dict(config or {}), num_cpus)
                _is_ours = True
            _open.add(self)
        self.node_ip: str = self.ray.util.get_node_ip_address()

    def _check_address(self, config: Mapping[str, Any]) -> None:
        wanted, current = config.get("address"), self.ray.get_runtime_context().gcs_address
        if isinstance(wanted, str) and ":" in wanted and "://" not in wanted and not _same(wanted, current):
            raise ValueError(
                f"ray_init_config['address']: this program is connected to the Ray cluster at {current} already, got "
                f"{wanted!r}. Drop it, or call ray.shutdown() before."
            )

    def close(self) -> None:
        """Have done with it. A cluster ends with that if it was started here, and no other session uses it."""
        global _is_ours
        if os.getpid() != self._home:
            return
        with _lock:
            if self not in _open:
                return
            _open.discard(self)
            if not _open and _is_ours:
                _is_ours = False
                if self.ray.is_initialized():
                    self.ray.shutdown()


def leave_connected() -> None:
    """Leave this process connected, and a cluster alive that was started here, whatever sessions are closed."""
    global _is_ours
    with _lock:
        _is_ours = False


def check_ray_init_config(name: str, value: object) -> object:
    """Test arguments of ``ray.init``.

    Raises:
        TypeError: they are no dictionary with names.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(
            f"{name}: expected a dictionary with arguments of ray.init, got {type(value).__name__}: {value!r}."
        )
    return value


def _connect(ray: Any, config: dict[str, Any], num_cpus: float) -> None:
    try:
        _init(ray, config, num_cpus)
    except ConnectionError as error:
        why = str(error.__cause__ or error).strip().splitlines()[-1]
        raise ConnectionError(f"ray_init_config['address']: {error}: {why}") from error


def _init(ray: Any, config: dict[str, Any], num_cpus: float) -> None:
    address = config.get("address")
    if address is not None and not isinstance(address, str):
        raise TypeError(f"ray_init_config['address']: expected a text, got {type(address).__name__}: {address!r}.")
    _check_answers("ray_init_config['address']", address)
    if address is None:
        _check_answers("RAY_ADDRESS", os.environ.get("RAY_ADDRESS"))
    elif address == "auto":
        ray.init(**config)
        return
    local = {"include_dashboard": False, **{name: value for name, value in config.items() if value is not None}}
    if "num_cpus" not in local:
        local["num_cpus"] = max(len(os.sched_getaffinity(0)), math.ceil(num_cpus))
    if address in (None, "local"):
        try:
            ray.init(**local)
            return
        except ValueError as error:  # there is a cluster on this machine, whose CPUs are what they are
            if config.get("num_cpus") is not None or "existing cluster" not in str(error):
                raise ValueError(f"ray_init_config: {error}") from error
    ray.init(**config)


def _check_answers(name: str, address: str | None) -> None:
    """Ray itself waits for minutes."""
    if address is None or "://" in address or ":" not in address:
        return
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ValueError(f"{name}: expected 'HOST:PORT', 'auto' or 'local', got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise ConnectionError(
            f"{name}: nothing answers at {address}: {error}. Start a cluster there (ray start --head --port={port}), "
            "or drop the address, and one is started on this machine."
        ) from error


def _same(left: str, right: str) -> bool:
    """Whether two addresses are of the same port of the same machine."""
    (one, _, port), (other, _, its_port) = left.rpartition(":"), right.rpartition(":")
    if port != its_port:
        return False
    try:
        return one == other or socket.gethostbyname(one) in (other, "127.0.0.1")
    except OSError:
        return False
