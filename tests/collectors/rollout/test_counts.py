"""The work of a step, counted: tensor operations, Python calls, bytes written, memory that stays.

Counts do not depend on the machine. Those of a step are the difference between a batch of 40 steps and one of 20, so
that what is done once a batch cancels. In the environments used here nothing ends, unless a test says otherwise.
"""

from __future__ import annotations

import functools
import gc
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import tensordict
import torch
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from tests.calls import Calls
from torch import distributions, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rollwright
from rollwright.collectors import Collector
from rollwright.collectors.rollout.paths import recording
from rollwright.envs import Compose, GymWrapper, InitTracker, RewardSum, StepCounter, TransformedEnv
from rollwright.errors import NotNative

FOREVER = 10**9  # steps
SHORT, LONG = 20, 40  # steps of the two batches
VIEWS = {
    "view",
    "t",
    "unsqueeze",
    "squeeze",
    "detach",
    "lift_fresh",
    "split",
    "chunk",
    "select",
    "slice",
    "permute",
    "expand",
}
NOTHING = {"to", "resolve_conj", "resolve_neg"}  # what a conversion to NumPy asks in inference mode: it does nothing
PACKAGES = {"ours": Path(rollwright.__file__).parent, "tensordict": Path(tensordict.__file__).parent}
MOVES = {"copy_", "clone", "_to_copy", "cat", "stack", "index", "index_put_", "zeros_like", "full"}


# What is counted ----------------------------------------------------------------------------------


def calm(env):
    """A CartPole, or a vector of them, in which no pole falls."""
    for part in getattr(env.unwrapped, "envs", [env]):
        part.unwrapped.theta_threshold_radians = part.unwrapped.x_threshold = np.inf
    return env


def cartpole(num_envs=None):
    options = {"max_episode_steps": FOREVER}
    if num_envs is None:
        env = gymnasium.make("CartPole-v1", **options)
    else:
        env = gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync", **options)
    return GymWrapper(calm(env), categorical_action_encoding=True)


def pendulum():
    return GymWrapper(gymnasium.make("Pendulum-v1", max_episode_steps=FOREVER))


def with_bookkeeping(env):
    return TransformedEnv(env, Compose(InitTracker(), StepCounter(), RewardSum()))


def actor(env):
    """4-64-64-2 with tanh; logits or mean and deviation, the action and its log-prob are stored."""
    discrete = env.observation_spec["observation"].shape[-1] == 4
    net = nn.Sequential(nn.Linear(4 if discrete else 3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    keys, kind = ["logits"], distributions.Categorical
    if not discrete:
        net, keys, kind = nn.Sequential(*net, NormalParamExtractor()), ["loc", "scale"], distributions.Normal
    return TensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=keys),
        ProbabilisticTensorDictModule(in_keys=keys, out_keys=["action"], distribution_class=kind, return_log_prob=True),
    )


CASES = {
    "1 CartPole": cartpole,
    "64 CartPole": lambda: cartpole(64),
    "Pendulum": pendulum,
    "1 CartPole, transforms": lambda: with_bookkeeping(cartpole()),
    "64 CartPole, transforms": lambda: with_bookkeeping(cartpole(64)),
}


def collector_of(case, steps, **options):
    """A Collector that has delivered two batches."""
    env = case() if callable(case) else CASES[case]()
    torch.manual_seed(0)
    collector = Collector(env, actor(env), frames_per_batch=steps * env.numel(), **options)
    collector.set_seed(0)
    for _ in range(2):
        collector.next()
    return collector


@pytest.fixture
def collect():
    """:func:`collector_of`, shut down after the test."""
    made = []
    yield lambda *args, **options: made.append(collector_of(*args, **options)) or made[-1]
    for collector in made:
        collector.shutdown()


def refuse(core):
    raise NotNative("a test")


@pytest.fixture
def plain_only(monkeypatch):
    """Collectors made from now on take the plain path."""
    monkeypatch.setattr("rollwright.collectors.rollout.paths.choice.arrays_of", refuse)


class Operations(TorchDispatchMode):
    """Counts tensor operations by name; remembers where copies went."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.copied = Counter()  # bytes by address of the destination

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name not in NOTHING or result is not args[0]:
            self.counts[name] += 1
        if name == "copy_":
            self.copied[result.data_ptr()] += result.nbytes
        return result


def operations(collector):
    with Operations() as counter:
        collector.next()
    return counter.counts


def python_calls(collector):
    """Calls of Python functions during a batch, by package."""
    with Calls() as calls:
        collector.next()
    counts = Counter({name: calls.within(root) for name, root in PACKAGES.items()})
    counts["others"] = calls.functions.total() - counts.total()
    return counts


@functools.cache
def per_step(counts, case, plain=False, **options):
    """What ``counts(collector)`` counts at each step, by name, and the sum of the rest of a batch."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr("rollwright.collectors.rollout.paths.choice.arrays_of", refuse)
        for steps in (SHORT, LONG):
            collector = collector_of(case, steps, **options)
            found.append(counts(collector))
            collector.shutdown()
    short, long = found
    steps = LONG - SHORT
    each = {name: (long[name] - short[name]) / steps for name in long if long[name] != short[name]}
    return each, sum(short.values()) - SHORT * sum(each.values())


def arithmetic(per_step):
    return {name: count for name, count in per_step.items() if name not in VIEWS}


# Tensor operations --------------------------------------------------------------------------------

# The network: three layers and two tanh. Categorical: normalised logits (7), probabilities (1), a race of exponential
# numbers (4), the log-prob (1). Normal: the deviation (5), the draw (4), the log-prob (8, a term of its formula each).
NETWORK, CATEGORICAL, NORMAL = 5, 13, 17
# Views: three transposed weights (for many environments), two of the action's index or one of the parameters' split,
# the observation taken from NumPy, each output given to it.
MOST = {
    "1 CartPole": (NETWORK + CATEGORICAL, 2 + 1 + 3),
    "64 CartPole": (NETWORK + CATEGORICAL, 3 + 2 + 1 + 3),
    "Pendulum": (NETWORK + NORMAL, 1 + 1 + 4),
}


@pytest.mark.parametrize("case", MOST)
def test_a_step_computes_what_the_policy_needs_and_nothing_else(case):
    most, views = MOST[case]
    each, rest = per_step(operations, case)
    computing = sum(arithmetic(each).values())
    assert computing <= most
    assert sum(each.values()) <= most + views
    assert rest <= 2 * 15 + 10  # for each entry: its tensor from NumPy; for the batch: NaN, episodes, ids
    assert computing >= NETWORK + 3  # it does act


@pytest.mark.parametrize("case", ["1 CartPole", "64 CartPole"])
def test_the_transforms_of_the_layout_add_no_tensor_operation(case):
    assert per_step(operations, f"{case}, transforms")[0] == per_step(operations, case)[0]


@pytest.mark.parametrize("option", ["compact_obs", "track_policy_version", "set_truncated", "return_same_td"])
def test_an_option_of_the_collector_adds_no_tensor_operation(option):
    assert per_step(operations, "1 CartPole", **{option: True})[0] == per_step(operations, "1 CartPole")[0]


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_policy_runs_without_tensor_operations(case):
    each, rest = per_step(operations, case, compile_policy=True)
    assert each == {}
    assert rest <= 2 * 20 + 16  # as above, and the noise of the batch


def test_operations_do_not_grow_with_the_number_of_environments():
    few, many = (per_step(operations, functools.partial(cartpole, n)) for n in (2, 16))
    assert few == many


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_read_from_a_tensor_and_no_tensor_is_copied_in_a_step(case):
    each, _ = per_step(operations, case)
    assert "_local_scalar_dense" not in each  # .item(), bool(tensor), int(tensor)
    assert not MOVES & set(each)


def test_the_plain_path_copies_each_entry_once_and_reads_four_flags():
    each, rest = per_step(operations, "1 CartPole", plain=True)
    assert each["copy_"] == 13  # the entries of a frame
    # Categorical's test of its logits, that of the action, the end of the step, whether ids are to change.
    assert each["_local_scalar_dense"] <= 4
    assert not (MOVES - {"copy_"}) & set(each)
    assert sum(each.values()) <= 77
    assert rest <= 100


# Python calls ---------------------------------------------------------------------------------------

# Ours: act 9 (path, actor, program, the network, three layers of one vector, the draw with its race and logits), step 5
# (path, environment's form, environment, action), record 1; a vector environment has its own books, flags, sizes.
CALLS = {
    "1 CartPole": 15,
    "64 CartPole": 26,
    "Pendulum": 18,
    "1 CartPole, transforms": 33,  # TransformedArrays, and three transforms with one function for arrays and tensors
    "64 CartPole, transforms": 43,
}


@pytest.mark.parametrize("case", CASES)
def test_python_calls_of_a_step(case):
    calls, _ = per_step(python_calls, case)
    assert calls["ours"] <= CALLS[case]
    assert calls.get("tensordict", 0) <= (2 if case == "Pendulum" else 0)  # the bound of the deviation is theirs


def test_python_calls_do_not_grow_with_the_number_of_environments():
    few, many = (per_step(python_calls, functools.partial(cartpole, n))[0] for n in (2, 16))
    assert few["ours"] == many["ours"]


# What is done once a batch: checks, memory for each entry, a TensorDict, episodes. A few functions of Python are other
# ones from version to version of numpy and tensordict.
ONCE = {"1 CartPole": 465, "64 CartPole": 465, "Pendulum": 495}


@pytest.mark.parametrize("encoding", [False, True], ids=["one-hot", "categorical"])
def test_python_calls_of_a_step_at_random(make, encoding):
    counts = []
    for steps in (SHORT, LONG):
        env = GymWrapper(calm(gymnasium.make("CartPole-v1")), categorical_action_encoding=encoding)
        collector = make(env, None, frames_per_batch=steps)
        collector.next()
        counts.append(python_calls(collector)["ours"])
    assert (counts[1] - counts[0]) / (LONG - SHORT) <= 15


@pytest.mark.parametrize("case", ONCE)
def test_python_calls_of_a_batch(case):
    _, rest = per_step(python_calls, case)
    assert rest <= ONCE[case]


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_policy_takes_fewer_python_calls(case):
    eager, compiled = (per_step(python_calls, case, compile_policy=flag)[0] for flag in (False, True))
    assert compiled["ours"] < eager["ours"]
    assert compiled.get("tensordict", 0) == 0


def test_the_counting_of_calls_sees_each_package():
    """The tests above can fail: the plain path does call tensordict."""
    assert per_step(python_calls, "1 CartPole", plain=True)[0]["tensordict"] > 50


# Bytes written --------------------------------------------------------------------------------------


class CountingRows(np.ndarray):
    """An array that counts the bytes written into it, by entry."""

    written: ClassVar[Counter] = Counter()

    def __array_finalize__(self, source):
        self.key = getattr(source, "key", None)

    def __setitem__(self, index, value):
        self.written[self.key] += np.asarray(self)[index].nbytes
        np.asarray(self)[index] = value

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        targets = [array for array in out or () if isinstance(array, CountingRows)]
        for array in targets:
            self.written[array.key] += array.nbytes
        if out is not None:
            options["out"] = tuple(np.asarray(array) for array in out)
        return getattr(ufunc, method)(*map(np.asarray, inputs), **options)


@pytest.fixture
def written(monkeypatch):
    """Bytes written into the memory of batches, by entry, as arrays."""
    rows = recording.BatchMemory.rows

    def counted(block, key):
        array = rows(block, key).view(CountingRows)
        array.key = key
        return array

    monkeypatch.setattr(recording.BatchMemory, "rows", counted)
    monkeypatch.setattr(CountingRows, "written", Counter())
    return CountingRows


@pytest.mark.parametrize("options", [{}, {"compact_obs": True}, {"track_policy_version": True}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_byte_of_a_batch_is_written_once(collect, written, case, options):
    collector = collect(case, 10, **options)
    written.written.clear()
    batch = collector.next()
    sizes = {key: batch[key].nbytes for key in written.written}
    del sizes["collector", "traj_ids"]  # they follow from ``done`` and are filled in at the end
    kept_aside = {("collector", "boundary"), ("collector", "traj_ids")}
    assert {key for key in batch.keys(True, True) if isinstance(batch[key], torch.Tensor)} == {*sizes, *kept_aside} - (
        set() if options.get("compact_obs") else {("collector", "boundary")}
    )
    assert {key: written.written[key] for key in sizes} == sizes


def test_every_byte_of_a_batch_is_written_once_where_episodes_end(make, written):
    collector = make(GymWrapper(gymnasium.make("CartPole-v1")), frames_per_batch=200)
    collector.set_seed(0)
    batch = collector.next()
    assert batch["next", "done"].sum() > 2
    del written.written["collector", "traj_ids"]
    assert dict(written.written) == {key: batch[key].nbytes for key in written.written}


def test_the_plain_path_writes_every_byte_once(collect, plain_only):
    collector = collect("1 CartPole", 10)
    with Operations() as counter:
        batch = collector.next()
    copied = dict(counter.copied)
    for key in batch.keys(True, True):
        entry = batch[key]
        rows = [row.data_ptr() for row in entry]
        assert [copied.pop(address) for address in rows] == [entry[0].nbytes] * 10, key
    assert copied == {}  # nothing was copied to anywhere else


@pytest.mark.parametrize("case", ["1 CartPole", "64 CartPole, transforms"])
def test_what_is_delivered_is_the_memory_that_rows_were_written_to(collect, monkeypatch, case):
    places = {}
    finish = recording.BatchMemory.finish

    def noted(block, steps):
        places.update({key: block.rows(key).__array_interface__["data"][0] for key in block.memory})
        return finish(block, steps)

    monkeypatch.setattr(recording.BatchMemory, "finish", noted)
    batch = collect(case, 10).next()
    assert {key: batch[key].data_ptr() for key in batch.keys(True, True)} == places


# Memory and locks of a step ---------------------------------------------------------------------------


class MemoryProbe:
    """As an ``interruptor``: notes what is allocated after 30 and after 190 steps of each batch of 200."""

    STEPS, EARLY, LATE = 200, 30, 190

    def __init__(self):
        self.t = 0
        self.early, self.growth = 0, [0] * 8

    def collection_stopped(self):
        batch, t = divmod(self.t, self.STEPS)
        self.t += 1
        if t == self.EARLY:
            self.early = self._seen()
        elif t == self.LATE:
            self.growth[batch] = self._seen() - self.early
        return False

    def _seen(self):
        gc.collect()  # also empties the interpreter's own stores of freed objects
        return tracemalloc.get_traced_memory()[0]


def growth_within_batches(collect, case, **options):
    """Bytes by which 160 steps of a batch have grown: the least of three batches."""
    probe = MemoryProbe()
    collector = collect(case, MemoryProbe.STEPS, interruptor=probe, **options)
    tracemalloc.start()
    try:
        for _ in range(3):
            collector.next()
    finally:
        tracemalloc.stop()
    return min(probe.growth[2:5])


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("1 CartPole", {}),
        ("1 CartPole", {"compile_policy": True}),
        ("1 CartPole", {"compact_obs": True}),
        ("8 CartPole, transforms", {}),
    ],
    ids=str,
)
def test_no_memory_is_taken_that_grows_with_steps(collect, case, options):
    env = CASES.get(case, lambda: with_bookkeeping(cartpole(8)))
    assert growth_within_batches(collect, env, **options) < 640  # one reference a step takes 1280


def test_a_list_that_grows_would_show(collect):
    """The test above can fail: one reference a step is seen."""
    kept = []

    def growing():
        env = cartpole()
        step = env._env.step

        def keep(action):
            kept.append(None)
            return step(action)

        env._env.step = keep
        return env

    assert growth_within_batches(collect, growing) >= 640


class CountedLock:
    """A lock that counts how often it is taken."""

    taken = 0

    def __init__(self):
        self._lock = LOCK()

    def acquire(self, *args, **kwargs):
        type(self).taken += 1
        return self._lock.acquire(*args, **kwargs)

    def release(self):
        self._lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


LOCK = threading.Lock


@pytest.mark.parametrize("case", ["1 CartPole", "64 CartPole", "1 CartPole, transforms"])
def test_no_lock_is_taken_in_a_step(collect, monkeypatch, case):
    monkeypatch.setattr(threading, "Lock", CountedLock)
    monkeypatch.setattr(CountedLock, "taken", 0)
    taken = []
    for steps in (SHORT, LONG):
        collector = collect(case, steps)
        before = CountedLock.taken
        collector.next()
        taken.append(CountedLock.taken - before)
    assert taken[0] == taken[1]


def test_envpool_costs_the_same_calls_for_any_number_of_environments():
    pytest.importorskip("envpool")
    from rollwright.envs import EnvPoolEnv

    def counts(num_envs):
        env = functools.partial(EnvPoolEnv, "CartPole-v1", num_envs, categorical_action_encoding=True)
        # Of 6 steps after 4 from the start no pole falls.
        collectors = [collector_of(env, steps, reset_at_each_iter=True) for steps in (2, 6)]
        found = [(operations(collector), python_calls(collector)["ours"]) for collector in collectors]
        for collector in collectors:
            collector.shutdown()
        (few, short), (many, long) = found
        return arithmetic(
            {name: (many[name] - few[name]) / 4 for name in many if many[name] != few[name]}
        ), long - short

    ops, calls = counts(64)
    assert (ops, calls) == counts(256)
    assert sum(ops.values()) <= NETWORK + CATEGORICAL
    assert calls / 4 <= 53
