"""The work of a step, counted: tensor operations, Python calls, bytes written, memory that stays.

Counts do not depend on the machine. Those of a step are the difference between a batch of 200 steps and one of 100, so
that what is done once a batch cancels. In the environments used here nothing ends, unless a test says otherwise.
"""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import tensordict
import torch
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rollwright
from rollwright.collectors import Collector, recording
from rollwright.envs import Compose, GymWrapper, InitTracker, RewardSum, StepCounter, TransformedEnv
from rollwright.errors import NotNative

FOREVER = 10**9  # steps
SHORT, LONG = 100, 200  # steps of the two batches
VIEWS = {"view", "t", "unsqueeze", "squeeze", "detach", "lift_fresh", "split", "select", "slice", "permute", "expand"}
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
        ProbabilisticTensorDictModule(
            in_keys=keys, out_keys=["action"], distribution_class=kind, return_log_prob=True
        ),
    )


CASES = {
    "1 CartPole": cartpole,
    "64 CartPole": lambda: cartpole(64),
    "Pendulum": pendulum,
    "1 CartPole, transforms": lambda: with_bookkeeping(cartpole()),
    "64 CartPole, transforms": lambda: with_bookkeeping(cartpole(64)),
}


@pytest.fixture
def collect(make):
    """``collect(case, steps, **options)``: a Collector that has delivered two batches."""

    def build(case, steps, **options):
        env = CASES[case]() if isinstance(case, str) else case
        torch.manual_seed(0)
        collector = make(env, actor(env), frames_per_batch=steps * env.numel(), **options)
        collector.set_seed(0)
        for _ in range(2):
            collector.next()
        return collector

    return build


@pytest.fixture
def plain_only(monkeypatch):
    """Collectors made from now on take the plain path."""

    def refuse(core):
        raise NotNative("a test")

    monkeypatch.setattr("rollwright.collectors._choice._arrays", refuse)


class Operations(TorchDispatchMode):
    """Counts tensor operations by name; remembers where copies went."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.copied = Counter()  # bytes by address of the destination

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] += 1
        result = func(*args, **(kwargs or {}))
        if name == "copy_":
            self.copied[result.data_ptr()] += result.nbytes
        return result


def operations(collector):
    with Operations() as counter:
        collector.next()
    return counter.counts


def operations_per_step(collect, case, **options):
    """Tensor operations of a step by name, and those of a batch that do not depend on its steps."""
    short, long = (operations(collect(case, steps, **options)) for steps in (SHORT, LONG))
    steps = LONG - SHORT
    per_step = {name: (long[name] - short[name]) / steps for name in long if long[name] != short[name]}
    return per_step, sum(short.values()) - SHORT * sum(per_step.values())


def arithmetic(per_step):
    return {name: count for name, count in per_step.items() if name not in VIEWS}


PACKAGES = {"ours": Path(rollwright.__file__).parent, "tensordict": Path(tensordict.__file__).parent}


def python_calls(collector):
    """Calls of Python functions during a batch, by package."""
    counts, roots = Counter(), {name: str(root) for name, root in PACKAGES.items()}

    def see(frame, event, argument):
        if event == "call":
            file = frame.f_code.co_filename
            counts[next((name for name, root in roots.items() if file.startswith(root)), "others")] += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        collector.next()
    finally:
        sys.setprofile(before)
    return counts


def python_calls_per_step(collect, case, **options):
    short, long = (python_calls(collect(case, steps, **options)) for steps in (SHORT, LONG))
    return {name: (long[name] - short[name]) / (LONG - SHORT) for name in (*PACKAGES, "others")}


# Tensor operations --------------------------------------------------------------------------------

# The network: three layers and two tanh. The draw: normalised logits (logsumexp, sub), probabilities (_softmax), a race
# of exponential numbers (empty_like, exponential_, div, argmax). The log-prob: gather.
NETWORK = {"addmm": 3, "tanh": 2}
CATEGORICAL = {
    **NETWORK,
    "logsumexp": 1,
    "sub": 1,
    "_softmax": 1,
    "empty_like": 1,
    "exponential_": 1,
    "div": 1,
    "argmax": 1,
    "gather": 1,
}
# The deviation: biased softplus (add, softplus, add) and its least value (clamp_min). The draw: empty, normal_, mul, add.
# The log-prob: -(value - loc)**2 / (2 * scale**2) - log(scale) - constant.
GAUSSIAN = {
    **NETWORK,
    "softplus": 1,
    "clamp_min": 1,
    "empty": 1,
    "normal_": 1,
    "add": 3,
    "mul": 2,
    "sub": 3,
    "pow": 2,
    "neg": 1,
    "div": 1,
    "log": 1,
}
# Views: three transposed weights, two of gather's index, the observation taken from NumPy and each output given to it;
# for a single environment addmm also wants each input and output as a matrix.
ARITHMETIC = {
    "1 CartPole": (CATEGORICAL, 3 + 2 + 1 + 3 + 6),
    "64 CartPole": (CATEGORICAL, 3 + 2 + 1 + 3),
    "Pendulum": (GAUSSIAN, 3 + 1 + 1 + 4 + 6),
}


@pytest.mark.parametrize("case", ARITHMETIC)
def test_a_step_computes_what_the_policy_needs_and_nothing_else(collect, case):
    expected, views = ARITHMETIC[case]
    per_step, per_batch = operations_per_step(collect, case)
    assert arithmetic(per_step) == expected
    assert sum(per_step.values()) - sum(expected.values()) <= views
    assert per_batch <= 160  # ten for each of 13 entries (lease, views for the owner), and thirty for the whole


@pytest.mark.parametrize("case", ["1 CartPole", "64 CartPole"])
def test_the_transforms_of_the_layout_add_no_tensor_operation(collect, case):
    bare, _ = operations_per_step(collect, case)
    assert operations_per_step(collect, f"{case}, transforms")[0] == bare


@pytest.mark.parametrize(
    "options",
    [
        {"compact_obs": True},
        {"track_policy_version": True},
        {"set_truncated": True},
        {"return_same_td": True},
        {"track_traj_ids": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_of_the_collector_adds_no_tensor_operation(collect, options):
    bare, _ = operations_per_step(collect, "1 CartPole")
    assert operations_per_step(collect, "1 CartPole", **options)[0] == bare


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_policy_runs_without_tensor_operations(collect, case):
    per_step, per_batch = operations_per_step(collect, case, compile_policy=True)
    assert per_step == {}
    assert per_batch <= 220  # up to 19 entries


def test_operations_do_not_grow_with_the_number_of_environments(collect):
    few, many = (operations_per_step(collect, cartpole(n)) for n in (2, 16))
    assert few == many


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_read_from_a_tensor_and_no_tensor_is_copied_in_a_step(collect, case):
    per_step, _ = operations_per_step(collect, case)
    assert "_local_scalar_dense" not in per_step  # .item(), bool(tensor), int(tensor)
    assert not MOVES & set(per_step)


def test_the_plain_path_copies_each_entry_once_and_reads_four_flags(collect, plain_only):
    per_step, per_batch = operations_per_step(collect, "1 CartPole")
    assert per_step["copy_"] == 13  # the entries of a frame
    # Categorical's test of its logits, that of the action, the end of the step, whether ids are to change.
    assert per_step["_local_scalar_dense"] <= 4
    assert not (MOVES - {"copy_"}) & set(per_step)
    assert sum(per_step.values()) <= 77
    assert per_batch <= 100


# Python calls ---------------------------------------------------------------------------------------

# Ours: act 15 (timer, path, inputs, program, layers, draw), step 14 (timer, path, environment, action, five values
# read), record 2, the interruptor 1, and ``cast`` 3 in single, 5 in vector environments.
CALLS = {
    "1 CartPole": 36,
    "64 CartPole": 51,
    "Pendulum": 38,
    "1 CartPole, transforms": 40,  # TransformedArrays and three transforms
    "64 CartPole, transforms": 55,
}


@pytest.mark.parametrize("case", CASES)
def test_python_calls_of_a_step(collect, case):
    calls = python_calls_per_step(collect, case)
    assert calls["ours"] <= CALLS[case]
    assert calls["tensordict"] <= (1 if case == "Pendulum" else 0)


def test_python_calls_do_not_grow_with_the_number_of_environments(collect):
    few, many = (python_calls_per_step(collect, cartpole(n)) for n in (2, 16))
    assert few["ours"] == many["ours"]


def test_a_compiled_policy_takes_fewer_python_calls(collect):
    eager, compiled = (python_calls_per_step(collect, "1 CartPole", compile_policy=flag) for flag in (False, True))
    assert compiled["ours"] <= eager["ours"] - 7
    assert compiled["tensordict"] == 0


def test_the_counting_of_calls_sees_each_package(collect, plain_only):
    """The tests above can fail: the plain path does call tensordict."""
    calls = python_calls_per_step(collect, "1 CartPole")
    assert calls["tensordict"] > 50


# Bytes written --------------------------------------------------------------------------------------


class CountingRows(np.ndarray):
    """An array that counts the bytes written into it, by entry."""

    written = Counter()

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
    rows = recording.Block.rows

    def counted(block, key):
        array = rows(block, key).view(CountingRows)
        array.key = key
        return array

    monkeypatch.setattr(recording.Block, "rows", counted)
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


def test_every_byte_of_a_batch_is_written_once_where_episodes_end(make, written, cartpole_actor):
    collector = make(GymWrapper(gymnasium.make("CartPole-v1")), cartpole_actor(), frames_per_batch=200)
    batch = collector.next()
    assert batch["next", "done"].sum() > 5
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
    finish = recording.Block.finish

    def noted(block, steps):
        places.update({key: block.rows(key).__array_interface__["data"][0] for key in block.memory})
        return finish(block, steps)

    monkeypatch.setattr(recording.Block, "finish", noted)
    batch = collect(case, 10).next()
    assert {key: batch[key].data_ptr() for key in batch.keys(True, True)} == places


# Memory and locks of a step ---------------------------------------------------------------------------


class MemoryProbe:
    """As an ``interruptor``: notes what is allocated after 50 and after 150 steps of each batch."""

    def __init__(self, steps):
        self.steps, self.t = steps, 0
        self.bytes, self.tensors = [0] * 8, [0] * 8

    def collection_stopped(self):
        self.t += 1
        if self.t % self.steps in (50, 150) and tracemalloc.is_tracing():
            at = 2 * (self.t // self.steps % 4) + (self.t % self.steps == 150)
            gc.collect()
            self.tensors[at] = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            self.bytes[at] = tracemalloc.get_traced_memory()[0]
        return False


def growth_within_batches(collect, case, **options):
    """Bytes, and tensors, by which 100 steps of a batch have grown, the least of three batches."""
    probe = MemoryProbe(LONG)
    collector = collect(case, LONG, interruptor=probe, **options)
    tracemalloc.start()
    try:
        for _ in range(4):
            collector.next()
    finally:
        tracemalloc.stop()
    grown = [[late - early for early, late in zip(seen[::2], seen[1::2], strict=True)] for seen in vars_of(probe)]
    return tuple(map(min, grown))


def vars_of(probe):
    return probe.bytes, probe.tensors


@pytest.mark.parametrize("options", [{}, {"compile_policy": True}, {"compact_obs": True}], ids=str)
@pytest.mark.parametrize("case", ["1 CartPole", "Pendulum", "64 CartPole, transforms"])
def test_no_memory_is_taken_that_grows_with_steps(collect, case, options):
    grown, tensors = growth_within_batches(collect, case, **options)
    assert grown < 400  # a list that grows by one reference a step takes 800
    assert tensors <= 0


def test_a_list_that_grows_would_show(collect, monkeypatch):
    """The test above can fail: one reference a step is seen."""
    kept = []
    monkeypatch.setattr(np.random, "seed", None)
    env = cartpole()
    step = env._env.step

    def keep(action):
        values = step(action)
        kept.append(None)
        return values

    env._env.step = keep
    assert growth_within_batches(collect, env)[0] >= 400


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

    def locked(self):
        return self._lock.locked()

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


@pytest.mark.parametrize("num_envs", [64, 256])
def test_envpool_costs_a_fixed_number_of_calls(make, num_envs):
    pytest.importorskip("envpool")
    from rollwright.envs import EnvPoolEnv

    def calls(steps):
        env = EnvPoolEnv("CartPole-v1", num_envs, categorical_action_encoding=True)
        collector = make(env, actor(env), frames_per_batch=steps * num_envs)
        collector.set_seed(0)
        collector.next()
        return python_calls(collector), operations(collector)

    (short, ops_short), (long, ops_long) = calls(10), calls(20)
    assert (long["ours"] - short["ours"]) / 10 <= 60
    assert (sum(ops_long.values()) - sum(ops_short.values())) / 10 <= 22
