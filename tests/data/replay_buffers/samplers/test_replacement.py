"""Samplers with and without replacement by one name, and several entries that end trajectories."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)


def test_replacement_chooses_the_sampler():
    assert type(RandomSampler()) is type(RandomSampler(replacement=True)) is RandomSampler
    without = RandomSampler(replacement=False, drop_last=True, shuffle=False)
    assert type(without) is SamplerWithoutReplacement
    assert (without.drop_last, without.shuffle) == (True, False)
    assert type(SliceSampler(slice_len=2, replacement=True)) is SliceSampler
    slices = SliceSampler(slice_len=2, replacement=False, shuffle=False, traj_key="episode")
    assert type(slices) is SliceSamplerWithoutReplacement
    assert (slices.slice_len, slices.shuffle) == (2, False)
    assert type(pickle.loads(pickle.dumps(slices))) is SliceSamplerWithoutReplacement
    assert type(SliceSamplerWithoutReplacement(slice_len=2, replacement=False)) is SliceSamplerWithoutReplacement


def test_without_replacement_each_element_comes_once():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(replacement=False), batch_size=3)
    buffer.extend(torch.arange(7))
    assert sorted(torch.cat(list(buffer)).tolist()) == list(range(7))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RandomSampler(drop_last=True), ValueError, "replacement=False"),
        (lambda: RandomSampler(shuffle=False), ValueError, "replacement=False"),
        (lambda: SliceSamplerWithoutReplacement(slice_len=2, replacement=True), ValueError, "Use a SliceSampler"),
        (
            lambda: PrioritizedSliceSampler(10, alpha=1.0, beta=1.0, slice_len=2, replacement=False),
            TypeError,
            "no PrioritizedSliceSampler draws without replacement",
        ),
        (lambda: SliceSampler(slice_len=2, end_key="a", end_keys=["b"]), ValueError, "expected one of them"),
        (lambda: SliceSampler(slice_len=2, end_keys="done"), TypeError, "end_keys: expected a list"),
        (lambda: SliceSampler(slice_len=2, end_keys=[]), TypeError, "at least one"),
        (lambda: SliceSampler(slice_len=2, end_keys=[3]), TypeError, "end_key: expected a string"),
    ],
)
def test_what_contradicts_itself_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def frames(ends: dict[str, list[int]], n: int = 12) -> TensorDict:
    marks = {name: torch.isin(torch.arange(n), torch.tensor(where)).unsqueeze(-1) for name, where in ends.items()}
    return TensorDict({"step": torch.arange(n), "next": marks}, [n])


@pytest.mark.parametrize("cls", [SliceSampler, SliceSamplerWithoutReplacement])
def test_a_trajectory_ends_where_any_of_the_flags_is_set(cls):
    sampler = cls(slice_len=12, end_keys=[("next", "terminated"), ("next", "truncated")], compile=False, use_gpu=False)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=12 * 20)
    buffer.extend(frames({"terminated": [3], "truncated": [7, 11]}))
    begins = [3, 7, 11]
    batch = buffer.sample()
    first = batch["step"][batch["is_init"].squeeze(-1)]
    assert set(first.tolist()) == {0, 4, 8}
    last = batch["step"][torch.cat([batch["is_init"].squeeze(-1)[1:], torch.tensor([True])])]
    assert set(last.tolist()) == set(begins)


def test_an_end_that_is_not_there_is_named():
    sampler = SliceSampler(slice_len=2, end_keys=[("next", "terminated"), ("next", "lost")])
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
    buffer.extend(frames({"terminated": [3], "truncated": [7]}))
    with pytest.raises(KeyError, match=r"end_keys: there is no entry \('next', 'lost'\)"):
        buffer.sample()


@pytest.mark.parametrize(("traj_key", "end_key"), [("run", "lost"), ("lost", ("next", "truncated"))])
def test_one_of_two_entries_that_are_named_may_be_missing(traj_key, end_key):
    data = frames({"truncated": [3]}).set("run", (torch.arange(12) >= 4).long())
    sampler = SliceSampler(slice_len=12, traj_key=traj_key, end_key=end_key)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=12)
    buffer.extend(data)
    batches = [buffer.sample()["step"].tolist() for _ in range(40)]
    assert {tuple(batch) for batch in batches} == {tuple(range(4)), tuple(range(4, 12))}
    assert (sampler.traj_key, sampler.end_keys) == (traj_key, (end_key,))


def test_two_entries_that_are_named_and_missing_are_an_error():
    sampler = SliceSampler(slice_len=2, traj_key="lost", end_key="gone")
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
    buffer.extend(frames({"truncated": [3]}))
    with pytest.raises(KeyError, match="traj_key: there is no entry 'lost'"):
        buffer.sample()
