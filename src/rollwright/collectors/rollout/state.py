"""Trajectories in progress: their ids, and their state as ``torch.load(..., weights_only=True)`` reads it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from rollwright.collectors.core import TrajectoryIds
from rollwright.data.entries import MadeEntries
from rollwright.envs.checkpoint import dump, load

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.ledger.ledger import Ledger


class TrajectoryPool:
    """Hands out trajectory ids, each once, in rising order.

    Args:
        ledger: of a replay buffer's storage: ids are taken there, so that collectors that write one buffer, one after
            another or at a time, have none in common; None: of this pool alone.

    Example:
        >>> pool = TrajectoryPool()
        >>> pool.get_traj_and_increment(2), pool.get_traj_and_increment(1)
        (tensor([0, 1]), tensor([2]))
        >>> pool.state_dict()
        {'traj_id': 3}
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._next = 0
        self._ledger = ledger

    def get_traj_and_increment(self, n: int = 1, device: torch.device | None = None) -> torch.Tensor:
        """``n`` fresh ids, int64 ``[n]``."""
        return torch.from_numpy(self.take(n)).to(device)

    def take(self, n: int) -> NDArray[np.int64]:
        """``n`` fresh ids as an array."""
        first = self._next
        if self._ledger is not None:
            first = self._ledger.take_ids(n)
            if first < self._next:  # the buffer was put back to an earlier state
                self._ledger.raise_ids(self._next)
                first = self._ledger.take_ids(n)
        self._next = first + n
        return np.arange(first, first + n, dtype=np.int64)

    def state_dict(self) -> dict[str, int]:
        """The next id to hand out."""
        return {"traj_id": self._next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on above the saved ids, and never below those handed out already."""
        self._next = max(self._next, int(state_dict["traj_id"]))
        if self._ledger is not None:
            self._ledger.raise_ids(self._next)


def replace_ended(ids: torch.Tensor, ended: torch.Tensor, pool: TrajectoryIds) -> torch.Tensor:
    """Ids of the next step: fresh ones where a trajectory ended.

    Args:
        ids: int64 ``[*env]``.
        ended: bool ``[*env]``.
        pool: where fresh ids come from.

    Returns:
        ``ids`` itself when nothing ended, else a new tensor.

    Example:
        >>> pool = TrajectoryPool()
        >>> ids = pool.get_traj_and_increment(3)
        >>> replace_ended(ids, torch.tensor([False, True, False]), pool)
        tensor([0, 3, 2])
    """
    count = int(ended.sum())
    if not count:
        return ids
    fresh = torch.from_numpy(pool.take(count)).to(ids.device)
    return ids.masked_scatter(ended.to(ids.device), fresh).reshape(ids.shape)


_STACKS = (LazyStackedTensorDict, NonTensorStack)
_DATA = (str, int, float, bool, bytes)


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
    """A TensorDict as ``torch.load(..., weights_only=True)`` reads it; its tensors are copied.

    Tensors, text, numbers, lists of them and lazy stacks are saved as what they are, and loading them runs no code;
    with any other object, and with tensorclass entries, all is a pickle.
    """
    if current is None:
        return None
    if _is_plain(current):
        return _node_state(current)
    return {"pickled": torch.frombuffer(bytearray(dump(current, {}, set())), dtype=torch.uint8)}


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor, plain data, or a TensorDict or a lazy stack of nothing else."""
    if type(value) is TensorDict:
        if MadeEntries.of(value) is not None:  # a pickle has what they are made of, once
            return False
        return all(_is_plain(entry) for entry in value.values())
    if type(value) in _STACKS:
        return all(_is_plain(row) for row in value.tensordicts)
    return type(value) is torch.Tensor or (type(value) is NonTensorData and _is_data(value.data))


def _is_data(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_data(one) for key, one in value.items())
    return all(map(_is_data, value)) if type(value) in (list, tuple) else value is None or type(value) in _DATA


def _node_state(td: Any) -> dict[str, Any]:
    if type(td) is NonTensorData:
        return {"batch_size": list(td.batch_size), "object": copy.deepcopy(td.data)}
    if type(td) in _STACKS:
        rows = [_node_state(row) for row in td.tensordicts]
        return {"stack_dim": td.stack_dim, "rows": rows, "text": type(td) is NonTensorStack}
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
    found: TensorDictBase = _node(saved)
    return found


def _node(saved: Mapping[str, Any]) -> Any:
    if "object" in saved:
        return NonTensorData(copy.deepcopy(saved["object"]), batch_size=saved["batch_size"])
    if "rows" in saved:
        kind = NonTensorStack if saved["text"] else LazyStackedTensorDict
        return kind(*map(_node, saved["rows"]), stack_dim=saved["stack_dim"])
    entries: dict[str, Any] = {}
    for key, value in saved["entries"].items():
        entries[key] = value.clone() if _is_leaf(value) else _node(value)
        if key in saved["on_cpu"]:
            entries[key] = entries[key].cpu()
    return TensorDict(entries, saved["batch_size"])
