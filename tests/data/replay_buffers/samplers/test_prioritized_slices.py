"""Prioritised slices begin where a whole slice fits, in proportion to the priority there."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rollwright.data.replay_buffers.samplers.slices import PrioritizedSliceSampler
from rollwright.data.replay_buffers.storages.tensors import LazyTensorStorage

IDS = ("collector", "traj_ids")


def append(storage, ids):
    """Frames ``[n]`` or ``[columns, n]`` of these trajectories."""
    ids = torch.as_tensor(ids)
    td = TensorDict({"id": ids}, ids.shape)
    td[IDS] = ids.clone()
    storage.append(td, dim=ids.ndim - 1)


def draw(sampler, storage, n, seed=0):
    with storage.ledger.reading():
        drawn = sampler.draw(storage, n, torch.Generator().manual_seed(seed))
    return drawn, sampler.mark(storage.read(drawn.index), drawn)


def starts(storage, length, strict):
    """Flat elements where a slice may begin, and its length, found by looking at every frame."""
    low, high = storage.ledger.live()
    gaps = {p for start, stop in storage.ledger.gaps().tolist() for p in range(start, stop)}
    ids, found, short = storage.entry("id", low, high), {}, {}
    for column in range(storage.columns):
        stop = high
        for p in range(high - 1, low - 1, -1):
            if p in gaps:
                stop = p
                continue
            if p + 1 < stop and ids[p + 1 - low, column] != ids[p - low, column]:
                stop = p + 1
            element = p % storage.capacity * storage.columns + column
            first = p == low or p - 1 in gaps or ids[p - 1 - low, column] != ids[p - low, column]
            if stop - p >= length:
                found[element] = length
            elif first and not strict:
                (short if p == low else found)[element] = stop - p
    return found, short


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(3, 30),
    columns=st.sampled_from([1, 3]),
    strict=st.booleans(),
    listen=st.booleans(),
)
def test_begins_exactly_where_slices_fit(seed, size, columns, strict, listen):
    rng = np.random.default_rng(seed)
    storage = LazyTensorStorage(size * columns, ndim=1 if columns == 1 else 2)
    length = int(rng.integers(1, 7))
    sampler = PrioritizedSliceSampler(size * columns, 1.0, 1.0, slice_len=length, strict_length=strict)
    last = np.arange(columns)
    for _ in range(12):
        n = int(rng.integers(1, size + 1))
        change = rng.random((columns, n)) < 0.2
        ids = last[:, None] + columns * np.cumsum(change, 1)
        last = ids[:, -1]
        append(storage, ids[0] if columns == 1 else ids)
        if rng.random() < 0.1:
            storage.ledger.abandon(storage.ledger.reserve(int(rng.integers(1, 3))))
        if listen:
            sampler.follow(storage)
        if rng.random() < 0.4:
            continue
        sampler.update_priority(rng.integers(0, size * columns, 4), rng.random(4), storage)
        found, short = starts(storage, length, strict)
        sampler.follow(storage)
        room = {int(i): int(sampler._room[i]) for i in np.flatnonzero(sampler._room)}
        # Of the oldest trajectory, whose front is gone, less than a slice may be left: drawn or not, it is no harm.
        assert {k: v for k, v in room.items() if k not in short} == found
        assert all(short[k] == v for k, v in room.items() if k in short)
        held = set(np.flatnonzero(sampler._masses.leaves).tolist())
        assert held == set(room)
        if room:
            drawn, batch = draw(sampler, storage, 4 * length)
            for first, end in zip(drawn.slices.first, drawn.slices.last, strict=True):
                assert end - first + 1 == room[drawn.index[first]]
                assert len(set(batch["id"][first : end + 1].tolist())) == 1
                positions = (drawn.index[first : end + 1] // columns - drawn.index[first] // columns) % size
                assert positions.tolist() == list(range(end - first + 1))


def test_begins_in_proportion_to_the_priority():
    storage = LazyTensorStorage(100)
    append(storage, [0] * 6 + [1] * 2 + [2] * 5)
    sampler = PrioritizedSliceSampler(100, 0.5, 1.0, slice_len=4)
    priorities = torch.rand(13, dtype=torch.float64) + 0.1
    sampler.update_priority(torch.arange(13), priorities, storage)
    drawn, batch = draw(sampler, storage, 4 * 20_000)
    first = drawn.index[drawn.slices.first]
    fits = np.array([0, 1, 2, 6, 8, 9])
    chances = priorities.numpy()[fits] ** 0.5
    chances /= chances.sum()
    counts = np.bincount(first, minlength=13)
    assert counts[fits].sum() == counts.sum()
    assert (((counts[fits] - 20_000 * chances) ** 2) / (20_000 * chances)).sum() < 5 + 5 * np.sqrt(10)
    weight = (priorities.numpy() / priorities.min().item()) ** -0.5
    lengths = drawn.slices.last - drawn.slices.first + 1
    np.testing.assert_allclose(drawn.info["priority_weight"], weight[first].repeat(lengths), rtol=1e-5)
    assert len(batch) == lengths.sum() == len(drawn.info["priority_weight"])
    assert set(lengths[first == 6]) == {2}


def test_another_length_of_slices_begins_elsewhere():
    storage = LazyTensorStorage(100)
    append(storage, [0] * 6)
    sampler = PrioritizedSliceSampler(100, 1.0, 1.0, num_slices=50, strict_length=True)
    assert set(draw(sampler, storage, 150)[0].index[::3].tolist()) == {0, 1, 2, 3}
    assert set(draw(sampler, storage, 250)[0].index[::5].tolist()) == {0, 1}
    append(storage, [0])
    assert set(draw(sampler, storage, 250)[0].index[::5].tolist()) == {0, 1, 2}
    with pytest.raises(ValueError, match="slice_len: expected at most 7, the length of the longest trajectory"):
        draw(sampler, storage, 400)


def test_padding_and_weights_have_one_length():
    storage = LazyTensorStorage(100)
    append(storage, [0, 1, 1, 2, 2, 2])
    drawn, batch = draw(PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=3, pad_output=True), storage, 90)
    assert len(batch) == len(drawn.info["priority_weight"]) == 90
    assert batch["collector", "mask"].sum() == (drawn.slices.last - drawn.slices.first + 1).sum()


def test_a_restored_sampler_draws_the_same():
    storage = LazyTensorStorage(60)
    append(storage, np.arange(50) // 9)
    sampler = PrioritizedSliceSampler(60, 0.7, 0.3, slice_len=4)
    sampler.update_priority(torch.arange(50), torch.rand(50), storage)
    twin = PrioritizedSliceSampler(60, 0.7, 0.3, slice_len=4)
    twin.load_state_dict(sampler.state_dict())
    unpickled = pickle.loads(pickle.dumps(sampler))
    append(storage, 9 + np.arange(30) // 9)
    sampler.alpha = twin.alpha = unpickled.alpha = 0.6
    for other in (twin, unpickled):
        for a, b in zip(draw(sampler, storage, 64)[0][:2], draw(other, storage, 64)[0][:2], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_spans_are_refused():
    with pytest.raises(ValueError, match="span: expected False where slices begin by priority, got True"):
        PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=4, span=True)


@pytest.mark.parametrize("room", [10, 20])
def test_goes_on_in_a_storage_of_another_size(room):
    storage, sampler = LazyTensorStorage(10), PrioritizedSliceSampler(10, 1.0, 0.5, slice_len=2)
    for serial in range(3):
        append(storage, [serial] * 5)
    priorities = torch.zeros(10)
    priorities[8] = 1.0
    sampler.update_priority(torch.arange(10), priorities, storage)
    large, other = LazyTensorStorage(room), PrioritizedSliceSampler(room, 1.0, 0.5, slice_len=2)
    large.load_state_dict(storage.state_dict())
    other.load_state_dict(sampler.state_dict())
    drawn, _ = draw(other, large, 20)
    assert set(drawn.index[::2].tolist()) == {8}  # positions 5 to 14 are live
    assert set(drawn.index[1::2].tolist()) == {9}
