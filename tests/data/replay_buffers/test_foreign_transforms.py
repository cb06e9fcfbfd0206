"""Transforms of other libraries in a replay buffer: their inverses are applied, or they are refused by name."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rollwright.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble


class Foreign(nn.Module):
    """A transform of another library: it always has an inverse, and need not say what for."""

    in_keys = ("serial",)
    in_keys_inv = ()

    def forward(self, data):
        return data.set("serial", data["serial"] + 100)

    def inv(self, data):
        return self._inv_call(data.copy())

    def _inv_call(self, data):
        return data.set("serial", data["serial"] - 100)


class ForeignCompose(nn.Module):
    def __init__(self, *transforms):
        super().__init__()
        self.transforms = nn.ModuleList(transforms)

    def forward(self, data):
        for transform in self.transforms:
            data = transform(data)
        return data

    def inv(self, data):
        for transform in reversed(self.transforms):
            data = transform.inv(data)
        return data


@pytest.mark.parametrize("transform", [Foreign, lambda: ForeignCompose(Foreign(), Foreign())])
def test_a_transform_of_another_library_is_inverted_on_what_is_written(transform):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=30, transform=transform())
    data = TensorDict({"serial": torch.arange(10)}, [10])
    buffer.extend(data)
    buffer.add(data[0])
    assert data["serial"].tolist() == list(range(10))
    assert (buffer[:]["serial"] < 0).all()
    assert set(buffer.sample()["serial"].tolist()) <= set(range(10))
    assert "inverse" in buffer.direct_writes()


def test_an_inverse_that_cannot_be_applied_is_refused_by_name():
    class Half:
        def __call__(self, data):
            return data

        def _inv_call(self, data):
            return data

    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    with pytest.raises(TypeError, match=r"Half has an inverse \(_inv_call\), and no method inv"):
        buffer.append_transform(Half())
    with pytest.raises(TypeError, match="Half"):
        ReplayBuffer(storage=LazyTensorStorage(20), transform=Half())
    assert buffer.transforms == []
    with pytest.raises(TypeError, match=r"Foreign has an inverse.*each member"):
        ReplayBufferEnsemble(buffer, transform=Foreign())


@pytest.mark.parametrize("index", [1, 10, -1])
def test_a_transform_beyond_the_end_is_refused(index):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20))
    with pytest.raises(IndexError, match="index: expected one from 0 to 0, got"):
        buffer.insert_transform(index, lambda data: data)
