"""Elements that have a batch size of their own, such as whole trajectories of one length."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer


def trajectories(n: int) -> TensorDict:
    values = torch.arange(n * 5.0).reshape(n, 5)
    return TensorDict({"obs": values, "next": TensorDict({"obs": values.unsqueeze(-1) + 1}, [n, 5])}, [n, 5])


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_batches_keep_the_batch_size_of_elements(kind, tmp_path):
    buffer = ReplayBuffer(storage=kind(8), batch_size=3)
    data = trajectories(6)
    buffer.extend(data)
    assert buffer.sample().batch_size == (3, 5)
    assert buffer[:].batch_size == (6, 5)
    assert bool((buffer[:] == data).all())
    assert buffer[2].batch_size == (5,)
    assert bool((buffer[2] == data[2]).all())
    buffer.dumps(tmp_path / "saved")
    twin = ReplayBuffer(storage=kind(8), batch_size=3)
    twin.loads(tmp_path / "saved")
    assert twin[:].batch_size == (6, 5)
    assert bool((twin[:] == data).all())
    twin[1] = data[0]
    twin.add(data[3])
    assert bool((twin[torch.tensor([1, 6])] == data[torch.tensor([0, 3])]).all())
