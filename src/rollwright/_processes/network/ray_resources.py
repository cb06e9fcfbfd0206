"""What actors of Ray ask of a cluster: their options, and whether the cluster can have what they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollwright._options import refuse_unknown

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
        session: a :class:`~rollwright._processes.network.ray_sessions.RaySession`.
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
