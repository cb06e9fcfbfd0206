"""Ray: sessions with a cluster, what actors ask for, and actors that run a process."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import os
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from rollwright._options import refuse_unknown
from rollwright._processes.channel import ByValue, Channel, ChannelClosed
from rollwright._processes.child import Child
from rollwright._processes.connection import NOTHING, ExceptionInfo
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


_KNOWN = (
    "num_cpus",
    "num_gpus",
    "memory",
    "resources",
    "accelerator_type",
    "label_selector",
    "fallback_strategy",
    "scheduling_strategy",
    "placement_group",
    "placement_group_bundle_index",
    "placement_group_capture_child_tasks",
    "runtime_env",
    "enable_task_events",
)
_LIFE = "each actor is started and ended by its collector, which alone knows it"
_CALLS = "each actor runs one method"
_RESERVED = {
    **dict.fromkeys(
        ("max_restarts", "max_task_retries"),
        "the collector replaces what fails. Pass on_worker_failure='restart' and max_restarts= to it",
    ),
    **dict.fromkeys(("name", "namespace", "get_if_exists", "lifetime"), _LIFE),
    **dict.fromkeys(("max_concurrency", "concurrency_groups", "max_pending_calls"), _CALLS),
}
_TINY = 1e-6


def check_remote_config(name: str, value: object) -> object:
    """Test options of actors: one dictionary, or a list with one for each.

    Raises:
        TypeError, ValueError: they are something else, or name an option that is unknown or reserved.
    """
    each = value if isinstance(value, list | tuple) else [value]
    for config in each:
        if not isinstance(config, Mapping):
            raise TypeError(
                f"{name}: expected a dictionary with options of Ray's actors, such as {{'num_cpus': 2}}, or a list "
                f"with one for each group, got {type(config).__name__}: {config!r}."
            )
        for key in config:
            if key in _RESERVED:
                raise ValueError(f"{name}: got {key!r}, but {_RESERVED[key]}. Drop it.")
        refuse_unknown(map(str, config), list(_KNOWN), name)
    return value


def configs_of(given: Any, workers_of_groups: Sequence[int]) -> list[dict[str, Any]]:
    """The options of each group's actor: a CPU for each of its workers, unless something else is said.

    Raises:
        ValueError: the list has another length.
    """
    count = len(workers_of_groups)
    each = list(given) if isinstance(given, list | tuple) else [given or {}] * count
    if len(each) != count:
        raise ValueError(
            f"remote_configs: expected one dictionary for each of the {count} groups, got {len(each)}. Pass a single "
            "one for all."
        )
    return [
        {"num_cpus": workers, **{name: value for name, value in config.items() if value is not None}}
        for workers, config in zip(workers_of_groups, each, strict=True)
    ]


def check_cluster(session: Any, configs: Sequence[Mapping[str, Any]], *, grows: bool | None) -> None:
    """Test whether nodes of the cluster have what actors ask for.

    Args:
        session: a :class:`~rollwright._processes.network.ray.RaySession`.
        configs: of the actors.
        grows: whether the cluster gets further nodes when they are asked for; None: as the cluster says.

    Raises:
        ValueError: they have not, and never will.
    """
    if grows or (grows is None and _has_autoscaler(session.ray)):
        return
    nodes = [node for node in session.ray.nodes() if node["Alive"]]
    total: dict[str, float] = {}
    for index, config in enumerate(configs):
        asked = _resources(config)
        places = _places(config, nodes)
        if places is None:  # Ray chooses between strategies
            continue
        if not any(_fits(asked, place) for place in places):
            raise ValueError(
                f"remote_configs: group {index} asks for {_text(asked)}, which no node of the Ray cluster has: there "
                f"{'are' if len(places) != 1 else 'is'} {_list(places)}. Ask for less, add a node, or, if nodes are "
                "added when they are asked for, pass autoscales=True."
            )
        if _is_free(config):
            _add(total, asked)
    whole: dict[str, float] = {}
    for node in nodes:
        _add(whole, node["Resources"])
    if not _fits(total, whole):
        raise ValueError(
            f"remote_configs: {len(configs)} groups ask for {_text(total)} in all, and the Ray cluster has "
            f"{_text({name: whole.get(name, 0.0) for name in total})}. Ask for less for each, such as "
            "{'num_cpus': 1}, add nodes, or, if nodes are added when they are asked for, pass autoscales=True."
        )


def asked_text(config: Mapping[str, Any]) -> str:
    """What an actor asks for, for messages."""
    return _text(_resources(config))


def _resources(config: Mapping[str, Any]) -> dict[str, float]:
    named = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    asked = {resource: float(config[name]) for name, resource in named.items() if config.get(name)}
    asked |= {name: float(count) for name, count in (config.get("resources") or {}).items() if count}
    if config.get("accelerator_type"):
        asked[f"accelerator_type:{config['accelerator_type']}"] = 1e-3
    return asked


def _is_free(config: Mapping[str, Any]) -> bool:
    """Whether an actor may be anywhere, and takes from what the cluster has."""
    return not hasattr(config.get("scheduling_strategy"), "placement_group") and not config.get("placement_group")


def _places(config: Mapping[str, Any], nodes: Sequence[Any]) -> list[Mapping[str, float]] | None:
    """Resources of the places that an actor may be put in; None: that is not known here."""
    strategy = config.get("scheduling_strategy")
    group = getattr(strategy, "placement_group", None) or config.get("placement_group")
    if group is not None and group != "default":
        specs = getattr(group, "bundle_specs", None)
        chosen = getattr(strategy, "placement_group_bundle_index", config.get("placement_group_bundle_index", -1))
        return specs if specs is None or chosen in (-1, None) else [specs[chosen]]
    if config.get("label_selector") or config.get("fallback_strategy"):
        return None
    node_id = getattr(strategy, "node_id", None)
    if node_id is not None and not getattr(strategy, "soft", False):
        return [node["Resources"] for node in nodes if node["NodeID"] == node_id]
    return [node["Resources"] for node in nodes]


def _fits(asked: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(count <= there.get(name, 0.0) + _TINY for name, count in asked.items())


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0.0) + count


def _list(places: Iterable[Mapping[str, float]]) -> str:
    return "; ".join(_text(place) for place in places) or "none"


def _text(resources: Mapping[str, float]) -> str:
    shown = {name: n for name, n in resources.items() if not name.startswith("node:") and name != "object_store_memory"}
    return ", ".join(
        f"{name} {count / 2**30:.3g} GiB" if name == "memory" else f"{name} {count:g}"
        for name, count in sorted(shown.items())
    )


def _has_autoscaler(ray: Any) -> bool:
    """Whether an autoscaler has said which nodes it can add."""
    try:
        return ray._private.state.state.get_max_resources_from_cluster_config() is not None
    except Exception:  # a version of Ray that has no such thing
        return False


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
