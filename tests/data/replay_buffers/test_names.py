"""Entries of the user's that are named as what batches of a buffer hold."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rollwright.collectors import Collector
from rollwright.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SliceSampler,
    TensorDictReplayBuffer,
)
from rollwright.envs import GymWrapper, InitTracker, RenameTransform, TransformedEnv


def prioritized(**options) -> TensorDictReplayBuffer:
    writer = RoundRobinWriter(track_generations=True)
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 0.7, 0.5), writer=writer, batch_size=4, **options
    )


def slices(**options) -> ReplayBuffer:
    sampler = SliceSampler(slice_len=2, traj_key="episode", **options)
    return ReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4)


OWN = {
    "numbers": ("index", torch.ones(6, 2)),
    "a column": ("index", torch.zeros(6, 1, dtype=torch.int64)),
    "weights": ("priority_weight", torch.ones(6, 3)),
    "counts": ("index_generation", torch.ones(6)),
}


@pytest.mark.parametrize("name", OWN)
def test_an_entry_that_batches_would_replace_is_refused(name):
    key, value = OWN[name]
    buffer, data = prioritized(), TensorDict({key: value, "obs": torch.zeros(6)}, [6])
    for write, given in (
        (buffer.extend, data),
        (buffer.extend, list(data)),
        (buffer.extend, lazy_stack(list(data))),
        (buffer.add, data[0]),
    ):
        with pytest.raises(ValueError, match=f"data: expected no entry '{key}', .*Rename it"):
            write(given)
    assert not len(buffer)


def test_an_observation_is_refused_whatever_its_form():
    index = torch.arange(6)
    data = TensorDict({"index": index, "next": {"index": index + 1}}, [6])
    with pytest.raises(ValueError, match="data: expected no entry 'index'"):
        prioritized().extend(data)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("ndim", [1, 2])
def test_batches_of_a_buffer_can_be_stored_in_another(storage, ndim):
    first = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=ndim), batch_size=4)
    data = TensorDict({"obs": torch.arange(12.0).reshape(3, 4)}, [3, 4])
    first.extend(data if ndim == 2 else data.reshape(-1))
    second = TensorDictReplayBuffer(storage=storage(20), batch_size=4)
    second.extend(first.sample())
    second.add(first.sample()[0])
    batch = second.sample()
    assert torch.equal(batch["obs"], second[batch["index"]]["obs"])
    both = ReplayBufferEnsemble(second, second, num_buffer_sampled=2, batch_size=8).sample()
    third = TensorDictReplayBuffer(storage=storage(20), batch_size=4)
    third.extend(both.reshape(-1))
    assert third.sample()["index"].shape == (4,)


def test_entries_stay_where_nothing_is_written():
    data = TensorDict({"index": torch.ones(6, 2), "priority_weight": torch.ones(6), "is_init": torch.ones(6)}, [6])
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    buffer.extend(data)
    batch = buffer.sample()
    assert (batch["index"] == 1).all()
    with pytest.raises(ValueError, match="sample: expected no entry 'index'"):
        buffer.sample(include_info=True)
    buffer.set_sampler(SliceSampler(slice_len=2, traj_key="is_init"))


def test_what_is_no_flag_is_not_marked():
    data = TensorDict({"is_init": torch.full((6, 2), 7.0), "episode": torch.zeros(6, dtype=torch.int64)}, [6])
    with pytest.raises(ValueError, match=r"init_key: expected 'is_init' to hold flags .*got torch.float32. Rename"):
        slices().extend(data)
    buffer = slices(init_key="begins")
    buffer.extend(data)
    assert (buffer.sample()["is_init"] == 7).all()
    buffer.set_sampler(slices().sampler)
    with pytest.raises(ValueError, match="init_key: expected 'is_init' to hold flags"):
        buffer.sample()


class Named(gymnasium.Env):
    """Observes entries of given names."""

    def __init__(self, *names: str) -> None:
        self.observation_space = gymnasium.spaces.Dict({name: gymnasium.spaces.Box(-1, 1, (2,)) for name in names})
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {name: np.full(2, 0.5, np.float32) for name in self.observation_space}, {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


class Marked(Named):
    """Observes flags of whole numbers."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Dict(is_init=gymnasium.spaces.Box(0, 1, (1,), np.uint8))
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"is_init": np.zeros(1, np.uint8)}, {}


def collect(env, buffer):
    collector = Collector(env, None, frames_per_batch=10, total_frames=10, replay_buffer=buffer)
    for _ in collector:
        pass
    collector.shutdown()
    return buffer.sample()


def test_environments_that_observe_such_entries_are_refused_by_collectors():
    with pytest.raises(ValueError, match=r"replay_buffer: the environment observes 'index', .*RenameTransform"):
        collect(GymWrapper(Named("index", "seen")), prioritized())
    with pytest.raises(ValueError, match=r"replay_buffer: the environment observes 'is_init', .*init_key"):
        collect(GymWrapper(Named("is_init")), slices())
    renamed = TransformedEnv(GymWrapper(Named("index")), RenameTransform(["index"], ["place"]))
    assert (collect(renamed, prioritized())["place"] == 0.5).all()
    tracked = TransformedEnv(GymWrapper(Named("seen")), InitTracker())
    sampler = SliceSampler(slice_len=2)
    batch = collect(tracked, TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=4))
    assert batch["is_init"].flatten().tolist() == [True, False, True, False]


def test_entries_of_private_names_are_said_once_to_be_in_no_batch():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector = Collector(GymWrapper(Named("_hidden", "seen")), None, frames_per_batch=4, total_frames=8)
        batches = list(collector)
        collector.shutdown()
    assert ["'_hidden'" in str(one.message) for one in caught] == [True]
    assert caught[0].filename == __file__
    assert "_hidden" not in batches[0].keys()  # noqa: SIM118


def test_entries_of_private_names_are_said_once_by_workers():
    envs = [lambda: GymWrapper(Named("_hidden", "seen"))] * 2
    with pytest.warns(UserWarning, match="announces '_hidden', and batches hold no entries") as caught:
        collector = Collector(envs, None, num_collectors=2, frames_per_batch=4, total_frames=4)
    assert len(caught) == 1
    assert all("_hidden" not in batch.keys() for batch in collector)  # noqa: SIM118
    collector.shutdown()


def test_flags_of_whole_numbers_are_marked_in_data_and_collected_alike():
    data = TensorDict({"is_init": torch.zeros(6, 1, dtype=torch.uint8), "episode": torch.zeros(6).long()}, [6])
    buffer = slices()
    buffer.extend(data)
    options = {"storage": LazyTensorStorage(20), "sampler": SliceSampler(slice_len=2), "batch_size": 4}
    for batch in (buffer.sample(), collect(GymWrapper(Marked()), ReplayBuffer(**options))):
        assert batch["is_init"].dtype == torch.uint8
        assert batch["is_init"].any()
