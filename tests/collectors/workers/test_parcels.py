"""Parcels: whatever is packed comes out equal, in memory of its own, and the message about it stays small."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from rollwright._memory.segment import Segment
from rollwright._processes.channel import Channel
from rollwright.collectors.workers.memory import Packer, unpack

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.fixture
def segments():
    pair = Segment(), Segment()
    yield pair
    for segment in pair:
        segment.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_kind(segments, dtype):
    memory = Packer(segments)
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    packed = [whole, whole[0, 0], whole[:, 1], whole.T, whole[:, :0], whole[1:2].expand(3, 6)]
    packed += [whole.conj()] if dtype.is_complex else []
    found = unpack(memory.pack(packed), segments)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in packed]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, packed, strict=True))


def test_other_things(segments):
    lazy = LazyStackedTensorDict(*[TensorDict({"a": torch.ones(n)}) for n in (1, 2)])
    weight = torch.nn.Parameter(torch.ones(3))
    tensor = torch.arange(3)
    td = TensorDict({"a": torch.ones(2, 3), ("b", "text"): NonTensorData("x", [2])}, [2], names=["time"])
    packed = {"lazy": lazy, "weight": weight, "twice": [tensor, tensor], "td": td, ("nested", 3): None}
    found = unpack(Packer(segments).pack(packed), segments)
    assert [row["a"].tolist() for row in found["lazy"].unbind(0)] == [[1.0], [1.0, 1.0]]
    assert isinstance(found["weight"], torch.nn.Parameter)
    assert found["weight"].requires_grad
    assert found["twice"][0] is found["twice"][1]
    assert found["td"].names == ["time"]
    assert found["td"]["b", "text"] == "x"
    assert ("nested", 3) in found


def test_the_message_is_small_however_much_is_packed(segments):
    """A worker never waits for room in the line: half of a small socket's buffer would hold dozens of these."""
    trajectories = [
        TensorDict({"a": torch.full((7, 50), float(n)), ("next", "b"): torch.ones(7)}, [7]) for n in range(99)
    ]
    memory = Packer(segments)
    mine, theirs = Channel.pair()
    for _ in range(2):  # as many as a worker packs before it is asked for more
        parcel = memory.pack([trajectories, "text" * 100_000])
        assert len(pickle.dumps(parcel)) < 200
        mine.send(parcel, timeout_s=0.0)  # nobody reads
    for _ in range(2):
        found, text = unpack(theirs.recv(5.0), segments)
        assert len(text) == 400_000
        assert all(bool((mine == theirs).all()) for mine, theirs in zip(found, trajectories, strict=True))


def test_what_was_opened_stays_when_the_memory_is_used_again(segments):
    memory = Packer(segments)
    first = unpack(memory.pack(torch.zeros(5000)), segments)
    for _ in range(2):
        memory.pack(torch.ones(6000))
    assert not first.any()
    first += 1
    assert bool((first == 1).all())


def test_what_cannot_be_pickled_leaves_the_memory_in_order(segments):
    memory = Packer(segments)
    with pytest.raises(TypeError):
        memory.pack([torch.zeros(10), (n for n in range(3))])
    assert unpack(memory.pack([torch.ones(3), "a"]), segments)[1] == "a"
