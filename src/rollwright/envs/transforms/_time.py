"""Where trajectories begin in data with a time dimension."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.layout import IS_INIT, NEXT_DONE, TRAJ_IDS
from rollwright.data.layout.boundaries import any_below

__all__ = ["expand_right", "time_axis", "trajectory_starts"]


def expand_right(rows: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``rows``, one number for each leading element of ``value``, expanded to its shape."""
    return rows.reshape(rows.shape + (1,) * (value.ndim - rows.ndim)).expand_as(value)


def time_axis(tensordict: TensorDictBase, who: str) -> int:
    """The batch dimension named "time", else the last.

    Raises:
        ValueError: there is no batch dimension.
    """
    if tensordict.ndim == 0:
        raise ValueError(
            f"{who}: expected data with a time dimension, got batch size []. Pass what rollout() returns or "
            "a collector yields; on single steps, put the transform on the environment."
        )
    names = list(tensordict.names)
    return names.index("time") if "time" in names else tensordict.ndim - 1


def trajectory_starts(tensordict: TensorDictBase, axis: int, done_key: NestedKey = NEXT_DONE) -> torch.Tensor:
    """For each frame the index along ``axis`` at which its trajectory, or its slice of one, begins.

    That is after a frame that is done, at another trajectory id, and at a frame marked ``"is_init"``,
    whichever are there; without any of them every row is one trajectory. One that began before the data counts as
    beginning with them.

    Returns:
        int64 of the batch size of ``tensordict``.
    """
    batch = tensordict.batch_size
    done, ids, first = (tensordict.get(key, None) for key in (done_key, TRAJ_IDS, IS_INIT))
    device = next((value.device for value in (done, ids, first) if value is not None), tensordict.device)
    begins = torch.zeros(batch, dtype=torch.bool, device=device)
    # What is rolled in at 0 counts for nothing there: it is the beginning in any case.
    if done is not None:
        begins = begins | any_below(done, len(batch)).roll(1, axis)
    if ids is not None:
        begins = begins | any_below(ids != ids.roll(1, axis), len(batch))
    if first is not None:
        begins = begins | any_below(first, len(batch))
    ordinal = torch.arange(batch[axis], device=begins.device).reshape([-1] + [1] * (len(batch) - axis - 1))
    return torch.where(begins, ordinal, 0).cummax(axis).values
