"""Where trajectories begin in data with a time dimension."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from rollwright._keys import unravel

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


def trajectory_starts(tensordict: TensorDictBase, axis: int, prefix: tuple[str, ...] = ()) -> torch.Tensor:
    """For each frame the index along ``axis`` at which its trajectory begins.

    A trajectory ends with ``("next", *prefix, "done")``; without such an entry every row is one trajectory.
    One that began before the data counts as beginning with them.

    Returns:
        int64 of the batch size of ``tensordict``.
    """
    batch = tensordict.batch_size
    done = tensordict.get(unravel(("next", *prefix, "done")), None)
    if done is None:
        return torch.zeros(batch, dtype=torch.int64, device=tensordict.device)
    done = done.reshape(*batch, -1).any(-1)
    ordinal = torch.arange(batch[axis], device=done.device).reshape([-1] + [1] * (len(batch) - axis - 1))
    # Frame t begins a trajectory if frame t - 1 ended one; what is rolled in at 0 counts for nothing there.
    begins = torch.where(done.roll(1, axis), ordinal, 0)
    return begins.cummax(axis).values
