"""ListStorage: where its tensors lie."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from rollwright.data import ListStorage, ReplayBuffer


def test_tensors_are_moved_to_the_device():
    storage = ListStorage(10, device="meta", compilable=True)
    assert storage.device == torch.device("meta")
    storage.append([torch.zeros(2), TensorDict({"a": torch.zeros(2)}), {"b": (torch.zeros(2), "text")}])
    assert storage[0].device.type == "meta"
    assert storage[1]["a"].device.type == "meta"
    assert storage[2]["b"][0].device.type == "meta"
    assert storage[2]["b"][1] == "text"
    storage[0] = torch.ones(2)
    assert storage[0].device.type == "meta"


def test_tensors_stay_where_they_are():
    storage = ListStorage(10)
    assert storage.device is None
    buffer = ReplayBuffer(storage=storage, batch_size=3)
    buffer.extend([torch.zeros(2, device="meta")])
    assert buffer.sample().device.type == "meta"
