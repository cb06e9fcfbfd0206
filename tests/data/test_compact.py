"""The compact layout by itself: what is kept aside, and the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NextStateReconstructor,
    ReplayBuffer,
    SliceSampler,
)
from rollwright.data.compact import BoundaryKeeper, Table, restore_next


def compacted(observation, following, ended, *, steps=None):
    """A batch ``[E, T]`` as a collector would store it: ``following`` is what came of each step."""
    envs, length = observation.shape
    keeper = BoundaryKeeper(["obs"], torch.Size([envs]), None)
    last = (length if steps is None else steps) - 1
    for t in range(last + 1):
        kept = torch.ones(envs, dtype=torch.bool) if t == last else ended[:, t]
        keeper.keep(t, TensorDict({"obs": following[:, t].clone(), "reward": torch.zeros(envs)}, [envs]), kept)
    batch = TensorDict({"obs": observation.clone(), "next": {"reward": torch.zeros(envs, length)}}, [envs, length])
    batch.names = [None, "time"]
    return keeper.finish(batch)


def walk(lengths, steps):
    """Environments that count from 0 in episodes of the given lengths: observation, next, ended."""
    observation = torch.stack([torch.arange(steps) % n for n in lengths])
    ended = torch.stack([torch.arange(steps) % n == n - 1 for n in lengths])
    return observation, observation + 1, ended


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 12))
def test_the_way_back_gives_every_next_observation(lengths, steps):
    observation, following, ended = walk(lengths, steps)
    restored = restore_next(compacted(observation, following, ended))
    assert torch.equal(restored["next", "obs"], following)
    assert torch.equal(restored["obs"], observation)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 12))
def test_only_ends_are_kept_aside(lengths, steps):
    observation, following, ended = walk(lengths, steps)
    batch = compacted(observation, following, ended)
    kept = ended.clone()
    kept[:, -1] = True
    assert torch.equal(batch["collector", "boundary"] >= 0, kept)
    assert sorted(batch["collector", "boundary"][kept].tolist()) == list(range(int(kept.sum())))


def test_what_is_kept_is_a_copy():
    """The environment may write its next observation into the same memory."""
    keeper = BoundaryKeeper(["obs"], torch.Size([1]), None)
    outcome = TensorDict({"obs": torch.tensor([5.0])}, [1])
    keeper.keep(0, outcome, torch.tensor([True]))
    outcome["obs"].fill_(9.0)
    batch = TensorDict({"obs": torch.zeros(1, 1)}, [1, 1])
    assert restore_next(keeper.finish(batch))["next", "obs"].item() == 5.0


def test_one_keeper_serves_batch_after_batch():
    keeper = BoundaryKeeper(["obs"], torch.Size([]), None)
    for number in range(3):
        for t in range(2):
            keeper.keep(t, TensorDict({"obs": torch.tensor(10 * number + t + 1)}), torch.tensor(t == 1))
        batch = TensorDict({"obs": torch.tensor([10 * number, 10 * number + 1])}, [2])
        assert restore_next(keeper.finish(batch))["next", "obs"].tolist() == [10 * number + 1, 10 * number + 2]


def test_a_batch_that_was_given_up_leaves_nothing():
    keeper = BoundaryKeeper(["obs"], torch.Size([]), None)
    keeper.keep(0, TensorDict({"obs": torch.tensor(99)}), torch.tensor(True))
    keeper.begin()
    keeper.keep(0, TensorDict({"obs": torch.tensor(1)}), torch.tensor(True))
    assert restore_next(keeper.finish(TensorDict({"obs": torch.tensor([0])}, [1])))["next", "obs"].tolist() == [1]


def test_nested_entries():
    keeper = BoundaryKeeper([("agents", "obs")], torch.Size([2]), None)
    following = torch.arange(6.0).reshape(2, 3)
    keeper.keep(0, TensorDict({"agents": {"obs": following}}, [2]), torch.tensor([True, True]))
    batch = TensorDict({"agents": {"obs": torch.zeros(2, 1, 3)}}, [2, 1])
    restored = restore_next(keeper.finish(batch))
    assert torch.equal(restored["next", "agents", "obs"], following.unsqueeze(1))


def test_the_way_back_leaves_the_batch_and_shares_its_tensors():
    batch = compacted(*walk([3], 5))
    restored = restore_next(batch)
    assert restored["obs"] is batch["obs"]
    assert set(batch["next"].keys()) == {"reward"}
    assert ("collector", "boundary") not in restored.keys(True)
    assert restored.names == batch.names


def test_a_whole_batch_is_refused():
    with pytest.raises(KeyError, match="compact_obs=True"):
        restore_next(TensorDict({"obs": torch.zeros(2)}, [2]))


def test_a_batch_that_was_cut_is_refused():
    batch = compacted(*walk([10], 5))
    with pytest.raises(ValueError, match="last step"):
        restore_next(batch[:, :3])


@pytest.mark.parametrize("picked", [[0, 4], [0, 1, 3, 4], [1, 0, 2, 3, 4]])
def test_frames_that_do_not_follow_one_another_are_refused(picked):
    batch = compacted(*walk([10], 5))
    with pytest.raises(ValueError, match="does not follow here"):
        restore_next(batch[:, torch.tensor(picked)])


def test_frames_that_follow_one_another_to_a_boundary_are_enough():
    batch = compacted(*walk([10], 5))
    assert torch.equal(restore_next(batch[:, 2:])["next", "obs"], restore_next(batch)["next", "obs"][:, 2:])


def test_frames_that_were_not_taken():
    """An interrupted batch ends early; what follows has trajectory id -1 and no next observation."""
    observation, following, ended = walk([10], 5)
    batch = compacted(observation, following, ended, steps=3)
    batch["collector", "traj_ids"] = torch.tensor([[0, 0, 0, -1, -1]])
    assert restore_next(batch)["next", "obs"][0, :3].tolist() == [1, 2, 3]


# Into storages ------------------------------------------------------------------------------------


def with_ids(lengths, steps):
    """A compact batch with trajectory ids and flags, and what was left out of it."""
    observation, following, ended = (value.double() for value in walk(lengths, steps))
    batch = compacted(observation, following, ended.bool())
    batch["next", "done"] = ended.bool().unsqueeze(-1)
    begun = ended.cumsum(-1) - ended
    batch["collector", "traj_ids"] = (begun + 100 * torch.arange(len(lengths)).unsqueeze(-1)).long()
    return batch, following


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_storages_of_tensors_say_that_they_leave_out_what_is_kept_aside(kind):
    batch, _ = with_ids([3, 5], 12)
    sampler = SliceSampler(slice_len=2, traj_key=("collector", "traj_ids"))
    buffer = ReplayBuffer(storage=kind(24), sampler=sampler, transform=NextStateReconstructor("obs"), batch_size=40)
    with pytest.warns(UserWarning, match=r"compact_obs=True.* are not stored.*restore_next\(data\)"):
        buffer.extend(batch.reshape(-1))
    stored = buffer[:]
    assert list(stored["collector"].keys()) == ["traj_ids"]
    with pytest.raises(KeyError, match="Collect with compact_obs=True"):
        restore_next(stored)
    sample = buffer.sample()
    pairs = sample.reshape(-1, 2)
    assert bool((pairs["collector", "traj_ids"][:, 0] == pairs["collector", "traj_ids"][:, 1]).all())
    assert bool((pairs["next", "obs"][:, 0] == pairs["obs"][:, 0] + 1).all())
    assert bool(pairs["next", "obs"][:, 1].isnan().all())
    with pytest.warns(UserWarning, match="compact_obs=True"):
        buffer.add(batch[0, 3])


def test_what_is_stored_restored_has_every_next_observation(recwarn):
    batch, following = with_ids([3, 5], 12)
    buffer = ReplayBuffer(storage=LazyTensorStorage(24))
    buffer.extend(restore_next(batch).reshape(-1))
    assert torch.equal(buffer[:]["next", "obs"], following.reshape(-1))
    assert not recwarn.list


def test_batches_of_two_dimensions_go_into_a_storage_of_two():
    batch, _ = with_ids([3, 5], 12)
    buffer = ReplayBuffer(storage=LazyTensorStorage(24, ndim=2))
    with pytest.warns(UserWarning, match="compact_obs=True"):
        buffer.extend(batch)
    assert torch.equal(buffer[:]["obs"].flatten().sort().values, batch["obs"].flatten().sort().values)


def test_a_list_keeps_the_whole_batch(recwarn):
    batch, following = with_ids([3, 5], 12)
    buffer = ReplayBuffer(storage=ListStorage(2))
    buffer.add(batch)
    assert torch.equal(restore_next(buffer[0])["next", "obs"], following)
    assert not recwarn.list


def test_what_is_kept_aside_can_be_compared_and_written_into_other_tensordicts():
    observation, following, ended = walk([2, 3], 6)
    first, again = compacted(observation, following, ended), compacted(observation, following, ended)
    other = compacted(observation + 1, following + 1, ended)
    key = ("collector", "boundaries")
    assert first[key] == again[key]
    assert first[key] != other[key]
    assert first[key] != 3
    assert hash(first[key]) == hash(again[key])
    assert isinstance(first[key], Table)
    rows = first.reshape(-1).clone()  # as TorchRL's storages do
    rows[torch.arange(12)] = other.reshape(-1)
    assert torch.equal(rows["obs"], other["obs"].flatten())
    assert rows[3][key] == other[key]
