"""Updates of weights in every form that users write them: for which models, and for which workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright.weight_update.forms import (
    Description,
    State,
    check_state,
    flat_state,
    of_part,
    prepare,
    split_by_worker,
)
from rollwright.weight_update.publisher import Update

__all__ = ["Update", "parse_update", "parse_update_for_workers", "pick_weights", "prepare", "snapshot"]


def pick_weights(positional: Any, weights: Any, policy: Any, policy_weights: Any = None) -> Any:
    """The one of several arguments for weights that was used; None when none was.

    Raises:
        ValueError: several were used.
    """
    names = ("policy_or_weights", "weights", "policy", "policy_weights")
    given = dict(zip(names, (positional, weights, policy, policy_weights), strict=True))
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise ValueError(f"{' and '.join(used)} were both given. Pass the weights in one way.")
    return given[used[0]] if used else None


def parse_update(
    given: Any,
    *,
    weights_dict: Mapping[str, Any] | None,
    model_id: str | None,
    worker_ids: Any,
    own: set[Any],
    fallback: Any,
) -> dict[str, Any]:
    """Weights by model, for a collector that is one worker.

    Args:
        given: of :func:`pick_weights`; may be a dictionary from worker indices to weights.
        weights_dict: weights by model.
        model_id: what ``given`` is for.
        worker_ids: the workers that are meant.
        own: the index and the device of this worker.
        fallback: where the policy's weights are read when nothing is given.

    Raises:
        ValueError: arguments contradict one another, or mean another worker.
    """
    _check_weights_dict(given, weights_dict, model_id)
    split = split_by_worker(given, worker_ids)
    if split is not None:
        worker_ids = sorted(split)
        given = split.get(worker_ids[0]) if len(split) == 1 else None
    named = worker_ids if isinstance(worker_ids, list | tuple) else [] if worker_ids is None else [worker_ids]
    strangers = [worker for worker in named if worker not in own]
    if strangers:
        index = next(worker for worker in own if isinstance(worker, int))
        raise ValueError(f"worker_ids: this collector is worker {index} alone, got {strangers}. Leave worker_ids out.")
    if weights_dict is not None:
        return dict(weights_dict)
    if given is None and model_id in (None, "policy"):
        given = fallback
    return {} if given is None else {model_id or "policy": given}


def parse_update_for_workers(
    given: Any,
    *,
    weights_dict: Mapping[str, Any] | None = None,
    model_id: str | None = None,
    worker_ids: Any = None,
    num_workers: int,
    devices: Sequence[torch.device | None] = (),
    fallback: Any = None,
    signature: Callable[[int, str], Description | None],
    state_of: Callable[[str, Any, Set[str]], State] | None = None,
) -> list[Update]:
    """What an update publishes to which workers; all of it is checked, nothing is copied.

    Args:
        given: of :func:`pick_weights`; may be a dictionary from worker indices to weights.
        weights_dict: weights by model.
        model_id: what ``given`` is for.
        worker_ids: indices or devices of the workers that are meant; None for all.
        num_workers: how many there are.
        devices: of their policies.
        fallback: where the policy's weights are read when nothing is given.
        signature: gives, for a worker and a model, what :func:`~rollwright.weight_update.forms.describe` says of
            the model in that worker; None: it checks weights itself.
        state_of: makes the weights for a model flat, given its name, the weights, and buffers that it may have; None:
            :func:`~rollwright.weight_update.forms.flat_state`.

    Returns:
        Updates for different workers, in the order of workers. One for None where all get the same. ``models`` is
        empty where nothing was given, and there is no fallback.

    Raises:
        ValueError: arguments contradict one another, or mean a worker that is not there; names or shapes differ from
            those of a worker's model.
        TypeError: weights of an unknown form.
    """
    _check_weights_dict(given, weights_dict, model_id)

    def flat(name: str, weights: Any, worker: int = 0) -> State:
        found = signature(worker, name)
        optional: Set[str] = frozenset() if found is None else found.optional
        return flat_state(weights, name, optional=optional) if state_of is None else state_of(name, weights, optional)

    name = model_id or "policy"
    split = split_by_worker(given, worker_ids)
    if split is not None:
        named = _workers(list(split), num_workers, devices)
        updates = [Update([worker], {name: flat(name, split[worker], worker)}) for worker in named]
    else:
        if weights_dict is None and given is None:
            if name != "policy":
                raise ValueError(f"model_id: got {name!r} and no weights for it. Pass some.")
            given = fallback
        by_model = dict(weights_dict) if weights_dict is not None else {} if given is None else {name: given}
        models = {model: flat(model, weights) for model, weights in by_model.items()}
        named = list(range(num_workers)) if worker_ids is None else _workers(worker_ids, num_workers, devices)
        updates = [Update(None if len(named) == num_workers else named, models)]
    for update in updates:
        for worker in range(num_workers) if update.workers is None else update.workers:
            for model, state in update.models.items():
                found = signature(worker, model)
                if found is not None:
                    own = state if found.part is None else of_part(state, found.signature.keys(), found.part)
                    check_state(own, found.signature, model, kind=found.kind, optional=found.optional)
    return updates


def _workers(given: Any, num_workers: int, devices: Sequence[torch.device | None]) -> list[int]:
    """Indices of workers that are given by index or by device, in order, once each."""
    named = list(given) if isinstance(given, list | tuple | set | range) else [given]
    if not named:
        raise ValueError("worker_ids: got none. Leave worker_ids out to update all workers.")
    found: set[int] = set()
    for worker in named:
        if isinstance(worker, int) and not isinstance(worker, bool):
            here = {worker} & set(range(num_workers))
        elif isinstance(worker, str | torch.device):
            device = torch.device(worker)
            here = {index for index, at in enumerate(devices) if at is not None and _same(at, device)}
        else:
            raise TypeError(f"worker_ids: expected indices or devices, got {type(worker).__name__}: {worker!r}.")
        if not here:
            at = ", ".join(sorted({str(device) for device in devices})) or "unknown devices"
            raise ValueError(f"worker_ids: expected some of 0 to {num_workers - 1}, on {at}, got {worker!r}.")
        found |= here
    return sorted(found)


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _check_weights_dict(given: Any, weights_dict: Any, model_id: str | None) -> None:
    if weights_dict is None:
        return
    if given is not None or model_id is not None:
        raise ValueError("weights_dict excludes model_id and other weights. Put all weights into weights_dict.")
    if not isinstance(weights_dict, Mapping):
        raise TypeError(f"weights_dict: expected weights by model, got {type(weights_dict).__name__}.")


def snapshot(weights: Any, optional: Set[str] = frozenset()) -> Any:
    """A copy of weights in any form that :func:`prepare` takes; what it does not take is returned as it is.

    Args:
        weights: in any form.
        optional: see :func:`~rollwright.weight_update.forms.flat_state`.
    """
    with torch.no_grad():
        if callable(weights) and not isinstance(weights, Mapping | TensorDictBase):
            weights = flat_state(weights, "a copy", optional=optional)
        if isinstance(weights, TensorDictBase):
            return weights.clone()
        if isinstance(weights, Mapping):
            return {key: snapshot(value) for key, value in weights.items()}
        return weights.detach().clone() if isinstance(weights, torch.Tensor) else weights
