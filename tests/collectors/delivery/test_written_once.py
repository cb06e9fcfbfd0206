"""Written once: with a replay buffer, a frame's arrays are written at the place where samplers read them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from rollwright.collectors.rollout.paths import recording
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictMaxValueWriter
from rollwright.envs import GymEnv
from rollwright.testing.mocking_classes import CountingBatchedEnv, CountingEnv

ENVS = {
    "arrays": lambda: GymEnv("CartPole-v1"),
    "vector of arrays": lambda: GymEnv("CartPole-v1", num_envs=4),
    "plain": lambda: CountingEnv(max_steps=4),
    "plain batch": lambda: CountingBatchedEnv(max_steps=torch.tensor([2, 4, 6, 8]), batch_size=[4]),
}
CASES = [(kind, ndim) for kind in ENVS for ndim in (1, 2) if ndim == 1 or kind in ("vector of arrays", "plain batch")]


class Copies(TorchDispatchMode):
    """Bytes that torch copies, by the storage that they are copied to."""

    def __init__(self):
        super().__init__()
        self.copied = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        for target in args[0] if name == "_foreach_copy_" else args[:1] if name == "copy_" else ():
            self.copied[target.untyped_storage().data_ptr()] += target.nbytes
        out = func(*args, **(kwargs or {}))
        if name in ("clone", "cat", "stack", "index_select", "_to_copy"):
            self.copied[out.untyped_storage().data_ptr()] += out.nbytes
        return out


class Rows(np.ndarray):
    """Rows of a batch that count the bytes written into them, by the address of the batch's memory."""

    def __array_finalize__(self, source):
        self.counter = getattr(source, "counter", None)
        self.home = getattr(source, "home", None)

    def __setitem__(self, index, value):
        self.counter[self.home] += np.asarray(self)[index].nbytes
        np.asarray(self)[index] = value


@pytest.fixture
def written(monkeypatch):
    """Bytes written by NumPy, by the address of an entry's memory."""
    counter, rows = Counter(), recording.BatchMemory.rows

    def counted(block, key):
        array = rows(block, key).view(Rows)
        array.counter, array.home = counter, block.memory[key].untyped_storage().data_ptr()
        return array

    monkeypatch.setattr(recording.BatchMemory, "rows", counted)
    return counter


def a_buffer(ndim=1, size=400, storage=LazyTensorStorage, **options):
    return ReplayBuffer(storage=storage(size, ndim=ndim), **options)


def forbid(buffer, *names):
    def refuse(*args, **kwargs):
        raise AssertionError("the buffer was asked to copy")

    for name in names:
        setattr(buffer, name, refuse)


@pytest.fixture
def memory_of_batches(monkeypatch):
    """The memory of each batch that is collected: ``{key: tensor}``."""
    blocks = []
    finish = recording.BatchMemory.finish

    def noted(block, steps):
        blocks.append(dict(block.memory))
        return finish(block, steps)

    monkeypatch.setattr(recording.BatchMemory, "finish", noted)
    return blocks


@pytest.mark.parametrize(("kind", "ndim"), CASES)
def test_the_memory_of_a_batch_is_the_rows_of_the_storage(make, memory_of_batches, kind, ndim):
    buffer = a_buffer(ndim)
    forbid(buffer, "extend", "add")
    collector = make(ENVS[kind](), None, frames_per_batch=40, total_frames=400, replay_buffer=buffer)
    list(collector)
    assert len(memory_of_batches) == 10
    storage = buffer.storage
    steps = 40 // collector.env.numel()
    for i, memory in enumerate(memory_of_batches):
        assert set(memory) == set(storage.keys())
        for key, tensor in memory.items():
            rows = storage._tensors[key]
            first = i * (40 if ndim == 1 else steps) * rows.stride(0) * rows.element_size()
            assert tensor.data_ptr() == rows.data_ptr() + first, key
    assert "direct" in collector.stats()["paths"]["buffer"]
    assert len(buffer) == 400


@pytest.mark.parametrize(("kind", "ndim"), CASES)
def test_every_byte_of_a_frame_is_written_once_and_nothing_is_copied(make, written, kind, ndim):
    buffer = a_buffer(ndim)
    collector = make(ENVS[kind](), None, frames_per_batch=40, replay_buffer=buffer)
    for _ in range(2):
        collector.next()
    written.clear()
    with Copies() as copies:
        for _ in range(3):
            collector.next()
    storage = buffer.storage
    sizes = {key: storage._tensors[key] for key in storage.keys()}  # noqa: SIM118 - a method of its own
    homes = {tensor.untyped_storage().data_ptr(): key for key, tensor in sizes.items()}
    per_frame = {key: t.nbytes // storage.max_size for key, t in sizes.items()}
    assert not collector.env.is_closed
    total = Counter(written)
    total.update({home: num for home, num in copies.copied.items() if home in homes})
    found = {homes[home]: num / 120 for home, num in total.items()}
    flags = {"done", "terminated", "truncated", ("next", "done"), ("collector", "traj_ids")}  # some are filled in
    for key, size in per_frame.items():
        if key not in flags:
            assert found[key] == size, key
        else:
            assert found.get(key, 0) <= size, key


@pytest.mark.parametrize("extra", [{}, {"post_collect_hook": lambda batch: None}], ids=["direct", "copied"])
def test_bytes_copied_per_frame(make, extra):
    """None where rows are written in place; each byte once where they are not."""
    buffer = a_buffer()
    collector = make(ENVS["vector of arrays"](), None, frames_per_batch=40, replay_buffer=buffer, **extra)
    collector.next()
    with Copies() as copies:
        collector.next()
    storage = buffer.storage
    homes = {tensor.untyped_storage().data_ptr() for tensor in storage._tensors.values()}
    per_frame = sum(tensor.nbytes for tensor in storage._tensors.values()) // storage.max_size
    copied = sum(num for home, num in copies.copied.items() if home in homes)
    assert copied == (40 * per_frame if extra else 0)


def test_a_whole_trajectory_is_copied_once(make, count):
    buffer = a_buffer()
    env = CountingEnv(max_steps=9)
    collector = make(env, count(env), frames_per_batch=4, replay_buffer=buffer, trajs_per_batch=1)
    for _ in range(5):
        collector.next()
    with Copies() as copies:
        for _ in range(5):
            collector.next()
    assert len(buffer) == 40
    storage = buffer.storage
    for key, tensor in storage._tensors.items():
        copied = copies.copied[tensor.untyped_storage().data_ptr()]
        assert copied == 20 * tensor.nbytes // storage.max_size, key


@pytest.mark.parametrize("kind", ["file", "shared"])
def test_where_other_processes_may_write_no_row_is_held_back(make, tmp_path, kind):
    storage = LazyMemmapStorage(400, scratch_dir=tmp_path) if kind == "file" else LazyTensorStorage(400)
    buffer, seen = ReplayBuffer(storage=storage, shared=True), []

    def policy(td):
        if len(buffer):
            buffer.extend(buffer[:1])
            seen.append(buffer.write_count)
        return td.set("action", torch.ones(1, dtype=torch.int8))

    collector = make(CountingEnv(max_steps=1000), policy, frames_per_batch=10, replay_buffer=buffer)
    collector.next()
    collector.next()
    assert seen == list(range(11, 21))
    assert buffer.write_count == 30
    assert "not held back" in collector.stats()["paths"]["buffer"]


class Doubled:
    """A transform with an inverse."""

    in_keys_inv = ("action",)

    def __call__(self, batch):
        return batch

    def inv(self, batch):
        return batch.clone()


@pytest.mark.parametrize(
    ("why", "buffer", "options"),
    [
        ("postproc", a_buffer, {"postproc": lambda batch: batch}),
        ("post_collect_hook", a_buffer, {"post_collect_hook": lambda batch: None}),
        ("transform", lambda: a_buffer(transform=Doubled()), {}),
        ("TensorDictMaxValueWriter", lambda: a_buffer(writer=TensorDictMaxValueWriter()), {}),
        ("larger than the storage", lambda: a_buffer(size=30), {}),
        ("not those of the storage", lambda: a_buffer(), {"use_buffers": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_it_cannot_be_a_batch_is_copied_and_the_reason_is_told(make, why, buffer, options):
    made = buffer()
    warned = pytest.warns(UserWarning, match="frames_per_batch=40 .*room for 30: 10 frames")
    with warned if "larger" in why else contextlib.nullcontext():
        collector = make(ENVS["arrays"](), None, frames_per_batch=40, replay_buffer=made, **options)
    collector.next()
    if "use_buffers" in options:
        assert collector._rollout.memory.num_copied == 1  # no block is made: frames are stacked at the end
    else:
        assert why in collector.stats()["paths"]["buffer"]
    assert len(made) == min(40, made.storage.max_size)


def test_a_batch_that_is_stacked_anew_is_copied(make):
    """The policy writes something new in the middle of a batch: no row has a place for it."""
    steps = iter(range(100))

    def policy(td):
        td.set("action", torch.ones(1, dtype=torch.int8))
        return td.set("extra", torch.zeros(2 if next(steps) > 5 else 1))

    buffer = a_buffer()
    collector = make(CountingEnv(max_steps=100), policy, frames_per_batch=4, replay_buffer=buffer)
    collector.next()
    with pytest.raises(ValueError, match="whose shape varies"):
        collector.next()
    assert "do not lie where" in collector._rollout.memory._why_never
    assert len(buffer) == 4
    assert (buffer[:]["observation"].flatten() == torch.arange(4)).all()


def test_unpublished_rows_are_not_sampled(make):
    """While a batch is being written, samplers see the rows before it, and none of it."""
    buffer, seen = a_buffer(size=80, batch_size=16), []

    class Watching:
        def __init__(self, env):
            self.env, self.started = env, False

        def __call__(self, td):
            if len(buffer):
                seen.append((len(buffer), int(buffer.sample()["step"].max())))
            return td.set("action", torch.ones(1, dtype=torch.int8)).set("step", td["observation"].clone())

    env = CountingEnv(max_steps=1000)
    collector = make(env, Watching(env), frames_per_batch=20, replay_buffer=buffer)
    for _ in range(6):
        collector.next()
    assert {length for length, _ in seen[81:100]} == {60}  # of 80 rows, 20 are being written
    for i, (_, newest) in enumerate(seen):
        assert newest < 20 * (i // 20 + 1)


def test_a_small_buffer_that_is_sampled_meanwhile_is_never_empty(make):
    """In the background, rows that are being written would be out of sight: half of these."""
    buffer, seen = a_buffer(size=80), []

    def policy(td):
        seen.append(len(buffer))
        return td.set("action", torch.ones(1, dtype=torch.int8))

    env = CountingEnv(max_steps=1000)
    collector = make(env, policy, frames_per_batch=40, total_frames=400, replay_buffer=buffer)
    collector.start()
    collector._background.thread._thread.join(20.0)
    assert set(seen) == {0, 40, 80}
    assert seen == sorted(seen)
    assert "a thread collects" in collector.stats()["paths"]["buffer"]


@pytest.mark.parametrize("size", [40, 400])
def test_of_a_rollout_cut_short_what_was_taken_is_stored(make, same, size):
    """Though the rows that were given up are the next to be written."""
    plain = make(ENVS["vector of arrays"](), None, frames_per_batch=40)
    plain.set_seed(0)
    expected = plain.next()[:, :6]
    for ndim in (1, 2):
        buffer = a_buffer(ndim, size)
        collector = make(ENVS["vector of arrays"](), None, frames_per_batch=40, replay_buffer=buffer)
        collector.set_seed(0)
        steps = iter(range(100))
        collector._rollout.interrupted = lambda steps=steps: next(steps) == 5
        collector.next()
        assert len(buffer) == 24
        same(buffer[:] if ndim == 2 else buffer[:].reshape(4, 6), expected)


def test_rows_that_are_given_up_may_be_written_by_others_at_once(make, count, monkeypatch):
    buffer, env = a_buffer(size=20), CountingEnv(max_steps=1000)
    collector = make(env, count(env), frames_per_batch=10, replay_buffer=buffer)
    collector.next()
    extend, demo = buffer.extend, buffer[:].clone().apply_(torch.zeros_like)
    monkeypatch.setattr(buffer, "extend", lambda data: [extend(demo), extend(demo), extend(data)][-1])
    steps = iter(range(100))
    collector._rollout.interrupted = lambda: next(steps) == 5
    collector.next()
    newest = buffer[:][torch.arange(*buffer.storage.ledger.live())[-6:] % 20]
    assert newest["observation"].flatten().tolist() == list(range(10, 16))


def test_a_batch_that_leaves_the_rows_in_the_middle_waits_for_nobody(make, monkeypatch):
    """A storage of one batch: what was reserved in vain is given up before the batch is copied."""
    steps = iter(range(100))

    def policy(td):
        td.set("action", torch.ones(1, dtype=torch.int8))
        return td.set("note", "x") if next(steps) == 14 else td

    buffer = a_buffer(size=10)
    buffer.storage.ledger.timeout_s = 0.5
    extend = buffer.extend
    monkeypatch.setattr(buffer, "extend", lambda data: extend(data.exclude("note")))  # rows keep no text
    collector = make(CountingEnv(max_steps=1000), policy, frames_per_batch=10, replay_buffer=buffer)
    for i in range(3):
        collector.next()
        assert (buffer[:]["observation"].flatten().sort().values == torch.arange(10 * i, 10 * i + 10)).all()


def test_while_a_thread_collects_what_others_write_is_seen_at_once(make):
    reached, opened = threading.Event(), threading.Event()
    calls = iter(range(10_000))

    def policy(td):
        if next(calls) == 30:
            reached.set()
            assert opened.wait(20.0)
        return td.set("action", torch.ones(1, dtype=torch.int8))

    buffer = a_buffer(size=40)
    buffer.storage.ledger.timeout_s = 0.5
    collector = make(CountingEnv(max_steps=1000), policy, frames_per_batch=20, total_frames=40, replay_buffer=buffer)
    collector.start()
    assert reached.wait(20.0)
    demo = buffer[:].clone()
    try:
        for count in (40, 60, 80):
            buffer.extend(demo)
            assert (buffer.write_count, len(buffer)) == (count, 40)
    finally:
        opened.set()
    collector._background.thread._thread.join(20.0)
    assert buffer.write_count == 100
    assert collector.stats()["paths"]["buffer"].startswith("extend: a thread collects")


def test_tensordicts_made_by_hand_and_by_the_collector_share_a_buffer(make):
    buffer = a_buffer()
    collector = make(ENVS["arrays"](), None, frames_per_batch=40, replay_buffer=buffer)
    collector.next()
    by_hand: TensorDict = buffer[:].clone()
    buffer.extend(by_hand)
    collector.next()
    assert len(buffer) == 120
    assert (buffer[40:80] == by_hand).all()
