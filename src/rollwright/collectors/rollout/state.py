"""RolloutState: the trajectories in progress, in a form that ``torch.load(..., weights_only=True)`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from rollwright.envs.checkpoint.snapshot import dump, load

__all__ = ["RolloutState", "placed", "td_from", "td_state"]


class RolloutState(NamedTuple):
    """The trajectories in progress.

    Attributes:
        current: the current TensorDict, ``[*env]``; None: a reset comes first.
        reset_envs: environments that were reset since the last batch, bool ``[num_envs]``.
        unused_ids: of trajectories that have not taken a step, int64 ``[*env]``; None: all have.
    """

    current: TensorDictBase | None
    reset_envs: NDArray[Any]
    unused_ids: torch.Tensor | None


def placed(state: Any, device: torch.device | None = None) -> Any:
    """``state`` on ``device`` (None: CPU), wherever ``torch.load(..., map_location=...)`` has put it."""
    if isinstance(state, Mapping):
        return {key: placed(value, device) for key, value in state.items()}
    if isinstance(state, list):
        return [placed(value, device) for value in state]
    return state.to(device or "cpu") if isinstance(state, torch.Tensor) else state


def td_state(current: TensorDictBase | None) -> dict[str, Any] | None:
    """A TensorDict as ``torch.load(..., weights_only=True)`` reads it; its tensors are copied."""
    if current is None:
        return None
    if _is_plain(current):
        return _node_state(current)
    return {"pickled": torch.frombuffer(bytearray(dump(current, {}, set())), dtype=torch.uint8)}


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor, or a TensorDict of nothing else; stacks of many shapes and objects are not."""
    if type(value) is TensorDict:
        return all(_is_plain(entry) for entry in value.values())
    return type(value) is torch.Tensor


def _node_state(td: Any) -> dict[str, Any]:
    entries = {key: value.clone() if _is_leaf(value) else _node_state(value) for key, value in td.items()}
    on_cpu = [key for key, value in td.items() if _is_leaf(value) and value.device.type == "cpu"]
    return {"batch_size": list(td.batch_size), "entries": entries, "on_cpu": on_cpu}


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def td_from(saved: Mapping[str, Any] | None) -> TensorDictBase | None:
    """The TensorDict that :func:`td_state` saved."""
    if saved is None:
        return None
    if "pickled" in saved:
        current: TensorDictBase = load(saved["pickled"].cpu().numpy().tobytes(), {})
        return current
    return _node(saved)


def _node(saved: Mapping[str, Any]) -> TensorDict:
    entries: dict[str, Any] = {}
    for key, value in saved["entries"].items():
        entries[key] = value.clone() if _is_leaf(value) else _node(value)
        if key in saved["on_cpu"]:
            entries[key] = entries[key].cpu()
    return TensorDict(entries, saved["batch_size"])
