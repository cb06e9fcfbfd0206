"""The memory of batches: what the consumer keeps is never overwritten, what it drops is used again."""

from __future__ import annotations

import functools
import queue
import random
import threading
import tracemalloc
import zlib

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions, nn
from torch.profiler import ProfilerActivity, profile

from rollwright.collectors import Collector
from rollwright.data import restore_next
from rollwright.envs import GymEnv, GymWrapper
from rollwright.errors import NotNative

# Environments whose observations never repeat, so that every overwritten row shows ---------------------


class Meter(gymnasium.Env):
    """Observes how often it was stepped, and its step in the episode, which has seven."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.total = self.t = 0

    def _observed(self):
        return np.array([self.total, self.t], np.float64)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._observed(), {}

    def step(self, action):
        self.total, self.t = self.total + 1, self.t + 1
        return self._observed(), float(self.total % 5), self.t == 7, False, {}


class Meters(VectorEnv):
    """As :class:`Meter`, many at once: cheap. Environment ``i`` begins at step ``i % length``."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 - gymnasium's interface

    def __init__(self, num_envs, size=2, length=7):
        self.num_envs, self.length = num_envs, length
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.observation_space = spaces.Box(-np.inf, np.inf, (num_envs, size), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = spaces.MultiDiscrete([2] * num_envs)
        self.total, self.t = 0, np.arange(num_envs) % length

    def _observed(self):
        seen = np.empty(self.observation_space.shape, np.float32)
        seen[:] = self.t[:, None]
        seen[:, 0] = self.total
        return seen

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask")
        if mask is not None:
            self.t[mask] = 0
        return self._observed(), {}

    def step(self, actions):
        self.total += 1
        self.t += 1
        nothing = np.zeros(self.num_envs, np.bool_)
        return self._observed(), np.full(self.num_envs, self.total % 5.0), self.t >= self.length, nothing, {}


def actor(size, dtype=torch.float32):
    net = nn.Linear(size, 2, dtype=dtype)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return TensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=distributions.Categorical, return_log_prob=True
        ),
    )


def collector_of(path, num_envs, steps=10, *, size=2, length=7, **options):
    """A Collector over one environment (``num_envs`` 1) or a batch of them, on the path named."""
    dtype = torch.float64 if num_envs == 1 else torch.float32
    env = Meter() if num_envs == 1 else Meters(num_envs, size, length)
    with pytest.MonkeyPatch.context() as patch:
        if path == "plain":
            patch.setattr("rollwright.collectors.rollout.paths.choice.arrays_of", refuse)
        collector = Collector(
            GymWrapper(env, categorical_action_encoding=True),
            actor(size, dtype),
            frames_per_batch=steps * num_envs,
            **options,
        )
    collector.set_seed(0)
    torch.manual_seed(0)
    assert ("NumPy" in collector.stats()["paths"]["env"]) == (path == "arrays")
    return collector


def refuse(core):
    raise NotNative("a test")


@pytest.fixture
def collect():
    """:func:`collector_of`, shut down after the test."""
    made = []
    yield lambda *args, **options: made.append(collector_of(*args, **options)) or made[-1]
    for collector in made:
        collector.shutdown()


every_path = pytest.mark.parametrize("path", ["arrays", "plain"])
every_env = pytest.mark.parametrize("num_envs", [1, 3])
every_layout = pytest.mark.parametrize("options", [{}, {"compact_obs": True}], ids=["full", "compact"])


def entries(batch):
    """All tensors of a batch by key, those kept aside by ``compact_obs`` included."""
    found = {key: batch[key] for key in batch.keys(True, True) if isinstance(batch[key], torch.Tensor)}
    if ("collector", "boundary") in found:
        rows = batch["collector", "boundaries"].rows
        found |= {("boundaries", key): rows[key] for key in rows.keys(True, True)}
    return found


def checksum(batch):
    return {key: zlib.crc32(value.contiguous().numpy().tobytes()) for key, value in entries(batch).items()}


def lent_bytes(collector, batch):
    """Bytes of the entries of a batch that lie in the collector's memory."""
    aside = ("collector", "boundary")
    return sum(batch[key].nbytes for key in batch.keys(True, True) if key != aside and key[-1] != "boundaries")


# What is kept ------------------------------------------------------------------------------------------


@every_path
@every_env
@every_layout
@pytest.mark.parametrize("batches", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_every_tenth_batch_stays_as_it_was(collect, path, num_envs, options, batches):
    collector = collect(path, num_envs, **options)
    kept = []
    for i in range(batches):
        batch = collector.next()
        if i % 10 == 0:
            kept.append((batch, checksum(batch)))
    assert all(checksum(old) == before for old, before in kept)
    seen = torch.cat([batch["observation"][..., 0].flatten() for batch, _ in kept])
    assert len(seen.unique()) == len(kept) * 10  # no two steps look alike


@every_path
@every_env
def test_keeping_one_entry_keeps_that_entry_alone(collect, path, num_envs):
    collector = collect(path, num_envs)
    batch = collector.next()
    size, entry = lent_bytes(collector, batch), batch["next", "observation"]
    kept, before = [entry], entry.clone()
    del batch, entry
    for _ in range(5):
        collector.next()
    assert torch.equal(kept[0], before)
    # The memory of all entries once, and that of the entry a second time.
    assert collector.stats()["bytes_held"] == size + before.nbytes
    for _ in range(5):
        kept.append(collector.next()["next", "observation"])
    assert collector.stats()["bytes_held"] <= size + 6 * before.nbytes
    assert len({tensor.data_ptr() for tensor in kept}) == 6


@every_path
@every_env
def test_keeping_one_row_keeps_it(collect, path, num_envs):
    collector = collect(path, num_envs)
    rows = []
    for _ in range(12):
        row = collector.next()[..., 4]
        rows.append((row, row.clone()))
    for row, before in rows:
        assert all(torch.equal(row[key], before[key]) for key in before.keys(True, True))


WAYS = {
    "batch": lambda batch: batch,
    "entry": lambda batch: batch["observation"],
    "next": lambda batch: batch["next"],
    "row": lambda batch: batch[..., 3],
    "last steps": lambda batch: batch[..., -2:]["next", "reward"],
    "frame": lambda batch: batch.unbind(-1)[2],
    "numpy": lambda batch: batch["observation"].numpy(),
    "storage": lambda batch: batch["observation"].untyped_storage(),
    "ids": lambda batch: batch["collector", "traj_ids"].flatten(),
    "dlpack": lambda batch: torch.utils.dlpack.from_dlpack(batch["observation"]),
}


def content(kept):
    """A copy of what is kept, as arrays."""
    if isinstance(kept, torch.UntypedStorage):
        return [np.array(kept.tolist())]
    if isinstance(kept, np.ndarray):
        return [kept.copy()]
    tensors = [kept] if isinstance(kept, torch.Tensor) else entries(kept).values()
    return [tensor.numpy().copy() for tensor in tensors]


def unchanged(kept, before):
    return all(np.array_equal(now, then) for now, then in zip(content(kept), before, strict=True))


@pytest.mark.parametrize("path", ["arrays", "plain"])
@settings(max_examples=10, deadline=None)
@given(
    num_envs=st.sampled_from([1, 3]),
    compact=st.booleans(),
    plan=st.lists(st.tuples(st.sets(st.sampled_from(sorted(WAYS)), max_size=2), st.integers(0, 3)), max_size=15),
    seed=st.integers(0, 2**16),
)
def test_whatever_is_kept_and_dropped_nothing_kept_changes(path, num_envs, compact, plan, seed):
    collector, chance, held = collector_of(path, num_envs, compact_obs=compact), random.Random(seed), []
    for ways, drops in plan:
        batch = collector.next()
        size = lent_bytes(collector, batch)
        for way in sorted(ways):
            kept = WAYS[way](batch)
            held.append((kept, content(kept)))
            del kept
        del batch
        for _ in range(min(drops, len(held))):
            del held[chance.randrange(len(held))]
        assert all(unchanged(kept, before) for kept, before in held)
        # A place has as many slabs as loans were open, the last one included, and one more.
        assert collector.stats()["bytes_held"] <= size * (len(plan) + 1)
    collector.shutdown()


# What is dropped ---------------------------------------------------------------------------------------


@every_path
@every_env
@every_layout
def test_a_batch_that_is_dropped_gives_its_memory_to_the_next(collect, path, num_envs, options):
    collector = collect(path, num_envs, **options)
    collector.next()
    addresses = [collector.next()["observation"].data_ptr() for _ in range(8)]
    assert len(set(addresses)) == 1
    batch = collector.next()
    assert collector.stats()["bytes_held"] == lent_bytes(collector, batch)


@every_path
@every_env
@every_layout
def test_two_memories_alternate_where_the_last_batch_is_held_meanwhile(collect, path, num_envs, options):
    collector = collect(path, num_envs, **options)
    batch = collector.next()
    addresses = []
    for _ in range(8):
        batch = collector.next()  # the one before is dropped with this assignment
        addresses.append({key: batch[key].data_ptr() for key in ("observation", "action", ("next", "reward"))})
    assert addresses[:2] * 4 == addresses
    assert addresses[0] != addresses[1]
    assert collector.stats()["bytes_held"] == 2 * lent_bytes(collector, batch)


@every_path
def test_memory_falls_again_when_batches_that_were_held_are_dropped(collect, path):
    collector = collect(path, 3)
    held = [collector.next() for _ in range(10)]
    size = lent_bytes(collector, held[0])
    assert collector.stats()["bytes_held"] == 10 * size
    held.clear()
    collector.next()
    assert collector.stats()["bytes_held"] == 2 * size


@every_path
@every_env
def test_a_rollout_that_fails_leaves_no_memory_behind(collect, path, num_envs):
    collector = collect(path, num_envs)
    size = lent_bytes(collector, collector.next())
    step = collector.env._env.step
    for _ in range(5):
        calls = iter(range(100))

        def fail(action, calls=calls):
            if next(calls) == 4:
                raise OSError("a test")
            return step(action)

        collector.env._env.step = fail
        with pytest.raises(Exception, match="a test"):
            collector.next()
        collector.env._env.step = step
    collector.next()
    collector.next()
    assert collector.stats()["bytes_held"] <= 2 * size


# Who writes, who reads -------------------------------------------------------------------------------


def spoil(batch):
    """Write into every tensor of a batch, in place."""
    for value in entries(batch).values():
        value.copy_(torch.full_like(value, True if value.dtype == torch.bool else 99))


def stream(collector, treat=lambda batch: None):
    """Copies of six batches, each treated before the next is collected."""
    copies = []
    for _ in range(6):
        batch = collector.next()
        copies.append({key: value.clone() for key, value in entries(batch).items()})
        treat(batch)
    return copies


def assert_equal(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []


@every_path
@every_env
@pytest.mark.parametrize(
    "options",
    [{}, {"compact_obs": True}, {"return_same_td": True}, {"track_policy_version": True}, {"set_truncated": True}],
    ids=str,
)
def test_what_the_consumer_writes_into_its_batch_is_seen_by_no_one_else(collect, path, num_envs, options):
    build = functools.partial(collect, path, num_envs, steps=5, **options)
    assert_equal(stream(build()), stream(build(), spoil))


def zero_entry(batch):
    batch["observation"] = torch.zeros_like(batch["observation"])


def rename(batch):
    batch.rename_key_("observation", "seen")


def delete(batch):
    del batch["action"]


def exchange_next(batch):
    batch["next"] = batch["next"].clone().zero_()


def move(batch):
    batch.share_memory_()


@every_path
@pytest.mark.parametrize("change", [zero_entry, delete, exchange_next, move])
@pytest.mark.parametrize("options", [{}, {"return_same_td": True}], ids=str)
def test_whatever_becomes_of_a_batch_the_next_one_is_whole(collect, path, change, options):
    build = functools.partial(collect, path, 3, steps=5, **options)
    assert_equal(stream(build()), stream(build(), change))


@pytest.mark.parametrize("options", [{}, {"return_same_td": True}], ids=["full", "return_same_td"])
def test_entries_of_a_dtype_that_numpy_has_not(make, options):
    seen = []

    def policy(td):
        seen.append(torch.full((3,), float(len(seen)), dtype=torch.bfloat16))
        return td.set("action", torch.tensor([1, 0])).set("code", seen[-1])

    collector = make(GymEnv("CartPole-v1"), policy, frames_per_batch=4, trust_policy=True, **options)
    for _ in range(4):
        batch = collector.next()
        assert torch.equal(batch["code"], torch.stack(seen[-4:]))


@every_path
@every_layout
def test_batches_read_and_dropped_by_another_thread(collect, path, options):
    collector = collect(path, 3, **options)
    handed: queue.Queue = queue.Queue(maxsize=3)
    broken = []

    def read():
        held, chance = [], random.Random(0)
        while (item := handed.get()) is not None:
            held.append(item)
            del item
            while len(held) > 3 or (held and chance.random() < 0.5):
                batch, before = held.pop(chance.randrange(len(held)))
                broken.extend([1] * (checksum(batch) != before))
                del batch

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        batch = collector.next()
        handed.put((batch, checksum(batch)))
    handed.put(None)
    reader.join(20)
    assert broken == []
    # Four held by the reader, three waiting, one in each hand, and one more.
    assert collector.stats()["bytes_held"] <= 10 * lent_bytes(collector, batch)


@every_path
def test_compact_batches_that_were_kept_can_still_be_restored(collect, path):
    compact, full = collect(path, 3, compact_obs=True), collect(path, 3)
    kept = [(compact.next(), full.next()["next", "observation"].clone()) for _ in range(8)]
    assert all(torch.equal(restore_next(batch)["next", "observation"], wanted) for batch, wanted in kept)


# The peak ------------------------------------------------------------------------------------------------


def numpy_peak(collect_one):
    """Bytes that NumPy and Python hold at once beyond what they held before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        collect_one()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def torch_peak(collect_one):
    """Bytes that torch holds at once beyond what it held before, temporary memory of its operations included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        collect_one()
    held = most = 0
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        most = max(most, held)
    return most


def test_torch_peak_sees_temporary_memory():
    value = torch.zeros(1000, 1000)
    assert torch_peak(lambda: (value + 1).sum()) >= value.nbytes
    assert torch_peak(lambda: value.add_(1)) < value.nbytes / 10


@functools.cache
def bytes_beside(size, **options):
    """Bytes of a batch, and those that collecting it takes beside them at most: torch's peak may not meet NumPy's."""
    collector = collector_of("arrays", 2000, 100, size=size, length=200, **options)
    try:
        return measured(collector)
    finally:
        collector.shutdown()


def measured(collector):
    batch_bytes = sum(value.nbytes for value in entries(collector.next()).values())
    collector.next()
    beside = numpy_peak(collector.next) + torch_peak(collector.next)
    return batch_bytes, beside - (batch_bytes - collector.stats()["bytes_held"])  # what is no loan is allocated anew


OPTIONS = pytest.mark.parametrize("options", [{}, {"compact_obs": True}, {"compile_policy": True}], ids=str)


@OPTIONS
@pytest.mark.parametrize("size", [4, 64])
def test_a_batch_costs_at_its_peak_a_fifth_more_than_its_bytes(size, options):
    batch_bytes, beside = bytes_beside(size, **options)
    assert beside <= 0.2 * batch_bytes


@OPTIONS
def test_what_a_batch_costs_beside_its_bytes_does_not_depend_on_its_observations(options):
    _, beside = bytes_beside(64, **options)
    # Of each frame: two int64 for ids, two float64 for sums of rewards, the noise of two logits, what compact_obs
    # writes twice (an index), three flags; of one step: the arrays on their way into the batch.
    numbers = 2 * 8 + 2 * 8 + 2 * 4 + 8 + 3
    assert beside <= 2000 * (100 * numbers + 6 * 64 * 4)
