"""StalenessAwareSampler: the newer the likelier, and nothing that is too old."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import LazyTensorStorage, ListStorage, StalenessAwareSampler, TensorDictReplayBuffer


def filled(versions, size: int = 1000, storage=LazyTensorStorage, **options) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=storage(size), sampler=StalenessAwareSampler(**options), batch_size=4)
    versions = torch.as_tensor(versions)
    buffer.extend(TensorDict({"policy_version": versions, "obs": torch.arange(len(versions))}, [len(versions)]))
    return buffer


def shares(buffer: TensorDictReplayBuffer, draws: int = 3000) -> dict[int, float]:
    """How often each version is the first of a batch."""
    first = torch.tensor([int(buffer.sample(2)["policy_version"][0]) for _ in range(draws)])
    versions, counts = first.unique(return_counts=True)
    return dict(zip(versions.tolist(), (counts / draws).tolist(), strict=True))


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_weights_fall_with_staleness(storage):
    buffer = filled([0, 1, 2, 3] * 5, storage=storage)
    buffer.sampler.consumer_version = 3
    expected = torch.tensor([1 / 4, 1 / 3, 1 / 2, 1.0])
    expected /= expected.sum()
    found = shares(buffer)
    assert torch.allclose(torch.tensor([found[v] for v in range(4)]), expected, atol=0.04)


def test_a_function_of_staleness_gives_the_weights():
    buffer = filled([0, 1, 2, 3] * 5, staleness_weight_fn=lambda staleness: (staleness == 2).float())
    buffer.sampler.consumer_version = 3
    batch, info = buffer.sample(return_info=True)
    assert set(batch["policy_version"].tolist()) == {1}
    assert info["staleness"].tolist() == [2.0] * 4
    assert torch.equal(batch["staleness"], info["staleness"])


def test_nothing_too_old_is_drawn():
    buffer = filled(torch.arange(100), max_staleness=10)
    buffer.sampler.consumer_version = 99
    drawn = torch.cat([buffer.sample()["policy_version"] for _ in range(100)])
    assert int(drawn.min()) >= 89
    assert buffer.sampler.increment_consumer_version() == 100
    drawn = torch.cat([buffer.sample(20)["policy_version"] for _ in range(50)])
    assert set(drawn.tolist()) == set(range(90, 100))
    buffer.sampler.consumer_version = 200
    with pytest.raises(RuntimeError, match=r"all 100 elements are older than 10.*consumer_version is 200"):
        buffer.sample()


def test_a_batch_has_no_element_twice_where_there_are_enough():
    buffer = filled(torch.arange(50) // 10)
    buffer.sampler.consumer_version = 4
    for size in (10, 40, 49, 50):
        for _ in range(20):
            assert len(buffer.sample(size)["obs"].unique()) == size
    assert len(buffer.sample(60)["obs"]) == 60


def test_very_unequal_weights_give_distinct_elements_too():
    buffer = filled(torch.arange(40), staleness_weight_fn=lambda staleness: 1e-3 ** staleness.double())
    buffer.sampler.consumer_version = 39
    batch = buffer.sample(10)
    assert len(batch["obs"].unique()) == 10
    assert int(batch["obs"].min()) >= 25


def test_what_is_written_later_is_drawn_and_what_is_overwritten_is_not():
    buffer = filled([0] * 8, size=8)
    buffer.extend(TensorDict({"policy_version": torch.full((6,), 5), "obs": torch.arange(6)}, [6]))
    buffer.sampler.consumer_version = 5
    assert sorted(buffer.sample(8)["policy_version"].tolist()) == [0, 0, 5, 5, 5, 5, 5, 5]
    buffer[:2] = TensorDict({"policy_version": torch.tensor([7, 7]), "obs": torch.zeros(2, dtype=torch.int64)}, [2])
    assert sorted(buffer.sample(8)["policy_version"].tolist()) == [0, 0, 5, 5, 5, 5, 7, 7]
    buffer.empty()
    buffer.extend(TensorDict({"policy_version": torch.tensor([1]), "obs": torch.tensor([9])}, [1]))
    assert buffer.sample(3)["obs"].tolist() == [9, 9, 9]


def test_two_dimensions_and_a_trailing_one():
    sampler = StalenessAwareSampler(max_staleness=0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100, ndim=2), sampler=sampler, batch_size=4)
    versions = torch.arange(8).reshape(2, 4, 1)
    buffer.extend(TensorDict({"policy_version": versions}, [2, 4]))
    sampler.consumer_version = 7
    assert set(buffer.sample()["policy_version"].reshape(-1).tolist()) == {7}


def test_the_version_survives_saving_and_copies():
    buffer = filled([0, 1, 2])
    buffer.sampler.consumer_version = 2
    again = filled([0, 1, 2])
    again.load_state_dict(buffer.state_dict())
    copy = pickle.loads(pickle.dumps(buffer))
    for other in (again, copy):
        assert other.sampler.consumer_version == 2
        assert len(other.sample(3)["obs"].unique()) == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_staleness": 1.5}, TypeError, "max_staleness: expected an integer"),
        ({"staleness_weight_fn": 3}, TypeError, "staleness_weight_fn: expected a callable"),
        ({"version_key": 3}, TypeError, "version_key: expected a string"),
    ],
)
def test_options_that_are_wrong(options, error, message):
    with pytest.raises(error, match=message):
        StalenessAwareSampler(**options)


def test_entries_and_weights_that_are_wrong():
    with pytest.raises(KeyError, match=r"no entry 'other'.*has 'obs', 'policy_version'.*version_key="):
        filled([0], version_key="other").sample()
    with pytest.raises(ValueError, match=r"weights of at least 0"):
        filled([0, 1], staleness_weight_fn=lambda staleness: staleness - 10).sample()
    with pytest.raises(ValueError, match=r"0 for all"):
        filled([0, 1], staleness_weight_fn=lambda staleness: staleness * 0).sample()
    with pytest.raises(ValueError, match=r"one number for each element"):
        filled(torch.zeros(3, 2))
