"""A state that was taken is a copy: nothing that happens to the object, or to one that loads it, changes it."""

from __future__ import annotations

import copy
import queue
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.collectors.llm.fakes import FakeEnv, FakePolicy, FakeTokenizer

from rollwright.collectors import Collector, Evaluator
from rollwright.collectors.delivery.stored import QueueBacklog, QueueWriter
from rollwright.collectors.llm import LLMCollector
from rollwright.collectors.rollout.state import TrajectoryPool
from rollwright.collectors.rollout.stats import EpisodeStats
from rollwright.data import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RaggedStorage,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from rollwright.data.llm.chain import TokenChain
from rollwright.envs import EnvCreator, GymEnv, SerialEnv, TransformedEnv, VecNorm
from rollwright.envs.llm import DatasetSource, PolicyVersion
from rollwright.envs.llm.sources import QuerySource

SIZE = 40


def frames(n, start=0):
    serial = torch.arange(start, start + n)
    entries = {"serial": serial, "policy_version": serial // 9, "collector": {"traj_ids": serial // 7}}
    return TensorDict({**entries, "obs": torch.randn(n, 3), "priority": torch.rand(n)}, [n])


class UsedBuffer:
    """A buffer of which a part is saved; going on writes, samples and changes what is stored."""

    def __init__(self, part=None, *, storage=LazyTensorStorage, columns=1, **options):
        options.setdefault("limiter", SampleToInsertRatio(50.0, margin=1e6))
        self.buffer = TensorDictReplayBuffer(
            storage=storage(SIZE), batch_size=8, generator=torch.Generator().manual_seed(1), **options
        )
        self.saved = self.buffer if part is None else getattr(self.buffer, part)
        self.columns, self.written = columns, 0
        self.go_on()

    def go_on(self):
        buffer = self.buffer
        if self.written:
            buffer.sample()  # before anything else is written
        for _ in range(3):
            data = frames(17, self.written)
            index = buffer.extend(data if self.columns == 1 else torch.stack([data, data]))
            buffer.update_priority(index[index.reshape(len(index), -1)[:, 0] >= 0], 0.7)
            buffer.sample()
            self.written += 17
        if not isinstance(buffer.writer, TensorDictMaxValueWriter):
            ledger = buffer.storage.ledger
            ledger.abandon(ledger.reserve(3))  # a gap
        buffer[0] = frames(1, 900)[0] if self.columns == 1 else buffer[1]
        if hasattr(buffer.sampler, "consumer_version"):
            buffer.sampler.consumer_version += 1


class Used:
    """An object, and what goes on with it."""

    def __init__(self, saved, go_on):
        self.saved, self._go_on = saved, go_on
        self.go_on()

    def go_on(self):
        self._go_on(self.saved)


def ensemble():
    buffers = [UsedBuffer(sampler=SamplerWithoutReplacement, limiter=None) for _ in range(2)]
    made = ReplayBufferEnsemble(*(each.buffer for each in buffers), batch_size=8)

    def go_on(_):
        for each in buffers:
            each.go_on()
        made.sample()

    return Used(made, go_on)


def normalised():
    return TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"]))


def cartpole():
    return GymEnv("CartPole-v1")


def collecting(env=cartpole, **options):
    options = {"frames_per_batch": 20, "track_policy_version": True, **options}

    def go_on(collector):
        for _ in range(3):
            collector.next()
        collector.update_policy_weights_()

    return Used(Collector(env, **options), go_on)


def talking(**options):
    env = FakeEnv(3, epochs=None)
    collector = LLMCollector(env, FakePolicy(), track_policy_version=PolicyVersion(), **options)

    def go_on(each):
        for _ in range(3):
            each.next()

    return Used(collector, go_on)


class Loader:
    """A dataset whose ``state_dict()`` is its own memory, and which goes on with what it is given."""

    def __init__(self):
        self.place = {"row": 0}

    def __iter__(self):
        while True:
            self.place["row"] += 1
            yield {"query": f"row {self.place['row']}"}

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.place = state


def reading(make):
    def go_on(source):
        for _ in range(3):
            source.delivered(source.draw().origin)
            source.draw()

    return Used(make(), go_on)


def queried():
    source = QuerySource()
    source.add([{"query": f"row {n}", "chat": [{"content": "a"}]} for n in range(50)])
    return source


def backlog():
    made = QueueBacklog(QueueWriter(queue.Queue()))
    return Used(made, lambda each: each._rows.append(frames(3)))


def evaluating():
    return Used(Evaluator(cartpole, None, num_trajectories=1), lambda each: each.evaluate())


def counted():
    def go_on(stats):
        for ended in (np.zeros((2, 5), np.bool_), np.eye(2, 5, dtype=np.bool_), np.zeros((2, 5), np.bool_)):
            stats.update(np.ones((2, 5)), ended, np.zeros(2, np.bool_))

    return Used(EpisodeStats(), go_on)


def chained():
    def go_on(chain):
        if not len(chain.tokens):
            chain.open(torch.tensor([5, 6]))
        for _ in range(3):
            chain.answer(torch.tensor([7, 8]))
            chain.follow(torch.tensor([9]))

    return Used(TokenChain(FakeTokenizer(), template=None, reserve=64), go_on)


SAMPLERS = {
    "ConsumingSampler": ConsumingSampler,
    "SamplerWithoutReplacement": SamplerWithoutReplacement,
    "PrioritizedSampler": lambda: PrioritizedSampler(SIZE, 0.7, 0.5),
    "SliceSampler": lambda: SliceSampler(slice_len=4),
    "SliceSamplerWithoutReplacement": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "PrioritizedSliceSampler": lambda: PrioritizedSliceSampler(SIZE, 0.7, 0.5, slice_len=4),
    "StalenessAwareSampler": StalenessAwareSampler,
}
STORAGES = {
    "LazyTensorStorage": {"storage": LazyTensorStorage},
    "LazyTensorStorage ndim=2": {"storage": partial(LazyTensorStorage, ndim=2), "columns": 2},
    "TensorStorage": {"storage": lambda size: TensorStorage(frames(size))},
    "LazyMemmapStorage": {"storage": LazyMemmapStorage},
    "ListStorage": {"storage": ListStorage},
    "RaggedStorage": {"storage": RaggedStorage},
    "LazyTensorStorage shared": {"storage": LazyTensorStorage, "shared": True},
    "RaggedStorage shared": {"storage": RaggedStorage, "shared": True},
}
OBJECTS = {
    **{name: partial(UsedBuffer, "sampler", sampler=make) for name, make in SAMPLERS.items()},
    **{f"a buffer with {name}": partial(UsedBuffer, sampler=make) for name, make in SAMPLERS.items()},
    **{name: partial(UsedBuffer, "storage", **options) for name, options in STORAGES.items()},
    **{f"a buffer with {name}": partial(UsedBuffer, **options) for name, options in STORAGES.items()},
    "RoundRobinWriter": partial(UsedBuffer, "writer", writer=RoundRobinWriter),
    "TensorDictMaxValueWriter": partial(UsedBuffer, "writer", writer=partial(TensorDictMaxValueWriter, "priority")),
    "SampleToInsertRatio": partial(UsedBuffer, "limiter"),
    "ReplayBufferEnsemble": ensemble,
    "Collector": collecting,
    "Collector with statistics": partial(collecting, normalised),
    "Collector of TensorDicts": partial(collecting, partial(SerialEnv, 2, normalised)),
    "Collector of trajectories": partial(collecting, trajs_per_batch=2),
    "MultiCollector": partial(collecting, normalised, num_collectors=2, sync=False),
    "LLMCollector": partial(talking, dialog_turns_per_batch=3),
    "LLMCollector async_envs": partial(talking, dialog_turns_per_batch=3, async_envs=True),
    "LLMCollector of conversations": partial(talking, trajs_per_batch=2),
    "Evaluator": evaluating,
    "EnvCreator": lambda: Used(EnvCreator(normalised), lambda each: each().rollout(5)),
    "PolicyVersion": lambda: Used(PolicyVersion(), lambda each: each.increment_version()),
    "EpisodeStats": counted,
    "TrajectoryPool": lambda: Used(TrajectoryPool(), lambda each: each.take(3)),
    "TokenChain": chained,
    "QueueBacklog": backlog,
    "DatasetSource": lambda: reading(lambda: DatasetSource([{"query": f"row {n}"} for n in range(20)], epochs=None)),
    "DatasetSource of a loader": lambda: reading(lambda: DatasetSource(Loader(), epochs=None)),
    "QuerySource": lambda: reading(queried),
}
LIVE = {"policy_state_dict"}  # weights are those of the module, as everywhere in torch


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(name in LIVE or same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor) or hasattr(one, "batch_size"):
        return bool((one == other).all())
    return bool(one == other)


def state_of(found):
    return found.get_extra_state() if isinstance(found, PolicyVersion) else found.state_dict()


def load(found, state):
    if isinstance(found, PolicyVersion):
        found.set_extra_state(state)
    else:
        found.load_state_dict(state, **({"goes_on": True} if isinstance(found, EpisodeStats) else {}))


@pytest.mark.parametrize("name", OBJECTS)
def test_a_state_is_no_view_of_the_object(name):
    used = [OBJECTS[name]() for _ in range(2)]
    try:
        first, second = used
        state = state_of(first.saved)
        before = copy.deepcopy(state)
        first.go_on()
        assert same(state, before)
        if isinstance(first.saved, QueueBacklog):  # what loads it is its collector
            return
        load(second.saved, state)
        assert same(state, before)
        second.go_on()
        assert same(state, before)
    finally:
        for each in used:
            if hasattr(each.saved, "shutdown"):
                each.saved.shutdown()
