"""Uniform sampling with and without replacement: what can be drawn, how often, in which order, and again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollwright.data.replay_buffers.samplers.uniform import RandomSampler, SamplerWithoutReplacement, nth_live
from rollwright.data.replay_buffers.storages.storage import ListStorage
from rollwright.data.replay_buffers.storages.tensors import LazyTensorStorage


def write(storage, *shape):
    """Frames with a number of their own."""
    first = storage.ledger.live()[1] * storage.columns
    data = torch.arange(first, first + int(np.prod(shape)))
    if storage.ndim == 2:  # [columns, n]: numbered in the order of positions
        data = data.reshape(shape[::-1]).T
    storage.append(TensorDict({"x": data}, shape), dim=storage.ndim - 1)


def lose(storage, n):
    """A writer fails: a gap of ``n`` positions."""
    storage.ledger.abandon(storage.ledger.reserve(n))


def drawn(sampler, storage, n, seed=None):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with storage.ledger.reading():
        return sampler.draw(storage, n, generator).index


def live(storage):
    return set(storage.live_index().tolist())


def storage_with_gaps():
    storage = LazyTensorStorage(20)
    write(storage, 12)
    lose(storage, 3)
    write(storage, 7)
    lose(storage, 2)
    write(storage, 3)
    return storage  # positions 7..27 of which 12..15 and 22..24 are gaps


@pytest.mark.parametrize("size", [1, 7, 20, 33])
def test_random_reaches_all_that_lives_and_nothing_else(size):
    storage = LazyTensorStorage(20)
    write(storage, min(size, 20))
    if size > 20:
        write(storage, size - 20)
    assert set(drawn(RandomSampler(), storage, 1000, 0).tolist()) == live(storage)


def test_random_leaves_gaps_out_and_is_uniform():
    storage = storage_with_gaps()
    n = 30_000
    counts = np.bincount(drawn(RandomSampler(), storage, n, 1), minlength=20)
    held = np.array(sorted(live(storage)))
    assert len(held) == 15
    assert counts.sum() == counts[held].sum()
    expected = n / 15
    chi_square = ((counts[held] - expected) ** 2 / expected).sum()
    assert chi_square < 14 + 5 * np.sqrt(28)


def test_random_over_rows_of_several_elements():
    storage = LazyTensorStorage(24, ndim=2)
    write(storage, 4, 5)
    assert set(drawn(RandomSampler(), storage, 2000, 0).tolist()) == live(storage)
    lose(storage, 2)
    write(storage, 4, 1)
    assert set(drawn(RandomSampler(), storage, 2000, 0).tolist()) == live(storage)


def test_random_numbers_come_from_the_generator_or_from_torch():
    storage = LazyTensorStorage(1000)
    write(storage, 1000)
    one, two = drawn(RandomSampler(), storage, 50, 3), drawn(RandomSampler(), storage, 50, 3)
    np.testing.assert_array_equal(one, two)
    torch.manual_seed(5)
    three = drawn(RandomSampler(), storage, 50)
    torch.manual_seed(5)
    np.testing.assert_array_equal(three, drawn(RandomSampler(), storage, 50))
    assert (one != three).any()


def test_ranks_over_gaps_at_the_edges():
    gaps = np.array([[5, 8], [10, 11], [13, 15]])
    assert nth_live(np.arange(5), 5, gaps).tolist() == [8, 9, 11, 12, 15]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("make", [storage_with_gaps, lambda: ListStorage(50)])
def test_each_element_once_a_pass(make, shuffle):
    storage = make()
    if not len(storage):
        storage.append([object() for _ in range(15)])
    sampler, orders = SamplerWithoutReplacement(shuffle=shuffle), []
    for seed in range(3):
        batches, ended = [], []
        for _ in range(4):
            batches.append(drawn(sampler, storage, 4, seed))
            ended.append(sampler.ran_out)
        assert [len(batch) for batch in batches] == [4, 4, 4, 3]
        assert ended == [False, False, False, True]
        orders.append(np.concatenate(batches).tolist())
        assert sorted(orders[-1]) == sorted(live(storage))
    assert (orders[0] != orders[1]) == shuffle


def test_oldest_first_without_shuffling():
    storage = LazyTensorStorage(6)
    write(storage, 6)
    write(storage, 2)
    index = drawn(SamplerWithoutReplacement(shuffle=False), storage, 6)
    assert storage.read(index)["x"].tolist() == [2, 3, 4, 5, 6, 7]


def test_the_last_short_batch_can_be_left_out():
    storage = LazyTensorStorage(10)
    write(storage, 10)
    sampler = SamplerWithoutReplacement(drop_last=True)
    seen = [(len(drawn(sampler, storage, 4)), sampler.ran_out) for _ in range(4)]
    assert seen == [(4, False), (4, True), (4, False), (4, True)]
    with pytest.raises(ValueError, match=r"at most the 10 elements that are stored.*got 11.*drop_last=False"):
        drawn(SamplerWithoutReplacement(drop_last=True), storage, 11)


def test_a_pass_skips_what_was_overwritten_and_waits_with_what_is_new():
    storage = LazyTensorStorage(10)
    write(storage, 10)
    sampler = SamplerWithoutReplacement()
    first = storage.read(drawn(sampler, storage, 4))["x"].tolist()
    write(storage, 3)  # 0, 1 and 2 are gone
    rest = []
    while not sampler.ran_out:
        rest += storage.read(drawn(sampler, storage, 4))["x"].tolist()
    assert sorted(rest) == sorted(set(range(3, 10)) - set(first))
    following = storage.read(drawn(sampler, storage, 10))["x"].tolist()
    assert sorted(following) == list(range(3, 13))


def test_a_pass_that_was_overwritten_as_a_whole_gives_way_to_the_next():
    storage = LazyTensorStorage(10)
    write(storage, 10)
    sampler = SamplerWithoutReplacement()
    drawn(sampler, storage, 4)
    write(storage, 10)
    assert len(drawn(sampler, storage, 10)) == 10
    assert sampler.ran_out


def test_a_restored_pass_goes_on():
    storage = LazyTensorStorage(30)
    write(storage, 30)
    sampler = SamplerWithoutReplacement()
    drawn(sampler, storage, 8)
    twin = SamplerWithoutReplacement()
    twin.load_state_dict(sampler.state_dict())
    for _ in range(3):
        np.testing.assert_array_equal(drawn(sampler, storage, 8), drawn(twin, storage, 8))
        assert sampler.ran_out == twin.ran_out
    assert twin.ran_out


def test_fresh_samplers_have_nothing_to_save():
    assert RandomSampler().state_dict() == {}
    assert not RandomSampler().ran_out
    assert SamplerWithoutReplacement().state_dict() == {"left": None, "ran_out": False}
