"""Weights in every form that users pass them, and how a policy in this process takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rollwright._keys import key_str

__all__ = ["parse_update", "pick_weights", "prepare", "snapshot"]


def pick_weights(positional: Any, weights: Any, policy: Any) -> Any:
    """The one of three ways to pass weights that was used; None when none was.

    Raises:
        ValueError: several were used.
    """
    given = {"policy_or_weights": positional, "weights": weights, "policy": policy}
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
    fallback: nn.Module | None,
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
    if weights_dict is not None:
        if given is not None or model_id is not None:
            raise ValueError("weights_dict excludes model_id and other weights. Put all weights into weights_dict.")
        if not isinstance(weights_dict, Mapping):
            raise TypeError(f"weights_dict: expected weights by model, got {type(weights_dict).__name__}.")
    # A TensorDict is a Mapping too, and has no truth value.
    plain = isinstance(given, Mapping) and not isinstance(given, TensorDictBase)
    if plain and given and all(isinstance(key, int) for key in given):
        if worker_ids is not None:
            raise ValueError("worker_ids: got it beside weights by worker. Drop one of them.")
        worker_ids = sorted(given)
        given = given.get(worker_ids[0]) if len(given) == 1 else None
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


def prepare(target: Any, weights: Any, name: str) -> Callable[[], None]:
    """Check weights against the module that takes them; returns the call that copies them.

    Args:
        target: the module.
        weights: a module of the same structure, its ``state_dict``, or a (nested) TensorDict or dictionary.
        name: what the target is, for messages.

    Raises:
        TypeError: the target has no weights, or ``weights`` is none of these.
        ValueError: names or shapes differ.
    """
    if not isinstance(target, nn.Module):
        raise TypeError(
            f"{name}: {type(target).__name__} is no nn.Module and takes no weights. "
            "Pass a module as policy, or do not update its weights."
        )
    if isinstance(weights, nn.Module):
        state = weights.state_dict()
    elif isinstance(weights, TensorDictBase):
        state = _flat(weights)
    elif isinstance(weights, Mapping):
        nested = any(isinstance(value, Mapping | TensorDictBase) for value in weights.values())
        state = _flat(TensorDict(dict(weights))) if nested else dict(weights)
    else:
        raise TypeError(
            f"weights for {name}: expected a module, a TensorDict or a state_dict, got {type(weights).__name__}."
        )
    own = target.state_dict()
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    missing, unknown = tensors.keys() - state.keys(), state.keys() - own.keys()
    if missing or unknown:
        raise ValueError(
            f"weights for {name}: names differ from those of {type(target).__name__}. "
            f"Missing: {key_str(missing) or 'none'}; unknown: {key_str(unknown) or 'none'}."
        )
    for key, value in tensors.items():
        if not isinstance(state[key], torch.Tensor):
            raise TypeError(
                f"weights for {name}: expected a tensor at {key!r}, got {type(state[key]).__name__}. "
                "Pass a module, its state_dict, or TensorDict.from_module(module)."
            )
        if state[key].shape != value.shape:
            raise ValueError(
                f"weights for {name}: {key!r} has shape {list(state[key].shape)}, expected {list(value.shape)}."
            )
    full = {**own, **state}

    def copy() -> None:
        with torch.no_grad():
            target.load_state_dict(full)

    return copy


def snapshot(weights: Any) -> Any:
    """A copy of weights in any form that :func:`prepare` takes; what it does not take is returned as it is."""
    with torch.no_grad():
        if isinstance(weights, nn.Module):
            weights = weights.state_dict()
        if isinstance(weights, TensorDictBase):
            return weights.clone()
        if isinstance(weights, Mapping):
            return {key: snapshot(value) for key, value in weights.items()}
        return weights.detach().clone() if isinstance(weights, torch.Tensor) else weights


def _flat(weights: TensorDictBase) -> dict[str, Any]:
    return {key if isinstance(key, str) else ".".join(key): value for key, value in weights.items(True, True)}
