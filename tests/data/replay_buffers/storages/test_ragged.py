"""RaggedStorage: text, objects and tensors of other lengths, of one process and shared by many."""

from __future__ import annotations

import copy
import errno
import gc
import multiprocessing
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorClass, TensorDict, lazy_stack
from tests.data.replay_buffers.storages.ragged_records import check_whole, record, records
from torch.utils._python_dispatch import TorchDispatchMode

from rollwright._memory import Segment
from rollwright.cli import main
from rollwright.collectors import Collector
from rollwright.data import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RaggedStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from rollwright.errors import DamagedFileError
from rollwright.testing.mocking_classes import CountingEnv

FORK = multiprocessing.get_context("fork")
KINDS = ["private", "shared"]


def make(kind: str, size: int, *, chunk_bytes: int = 1 << 22, **options) -> ReplayBuffer:
    storage = RaggedStorage(size, chunk_bytes=chunk_bytes)
    return TensorDictReplayBuffer(**{"storage": storage, "shared": kind == "shared", "batch_size": 8, **options})


def serials(data) -> list[int]:
    return [int(element["serial"]) for element in data]


# Elements ------------------------------------------------------------------------------------------


def test_its_other_name():
    assert LazyStackStorage is RaggedStorage


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_lazy_stacks_of_whole_records(kind):
    buffer = make(kind, 20)
    for start in range(0, 50, 7):
        buffer.extend(records(1, start, 7))
    buffer.add(record(1, 56))
    assert (len(buffer), buffer.write_count) == (20, 57)
    assert sorted(serial for _, serial in check_whole(buffer[:])) == list(range(37, 57))
    batch = buffer.sample(30)
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch.batch_size == (30,)
    check_whole(batch)
    assert batch["index"].shape == (30,)
    assert isinstance(batch["text"], list)
    batch[0]["tokens"].zero_()
    batch[0]["meta"]["turns"].append("mine")
    check_whole(buffer[:])


class Chat(TensorClass):
    role: str
    content: str


@pytest.mark.parametrize("kind", KINDS)
def test_tensorclasses_come_back_as_themselves(kind):
    buffer = make(kind, 4)
    turns = lazy_stack([Chat(role="user", content="hi"), Chat(role="assistant", content="hello")])
    buffer.extend(lazy_stack([TensorDict({"history": {"prompt": turns[:1], "full": turns}})]))
    found = buffer[0]["history", "full"]
    assert type(found) is Chat
    assert list(found.content) == ["hi", "hello"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_cannot_be_kept_is_named_and_nothing_is_stored(kind):
    buffer = make(kind, 4)
    with pytest.raises(TypeError, match=r"got an object of type builtins.object in \('next', 'odd'\).*ListStorage"):
        buffer.extend(lazy_stack([record(0, 0), TensorDict({"next": {"odd": NonTensorData(object())}})]))
    with pytest.raises(TypeError, match="expected a TensorDict or tensor, or a list of TensorDicts, got dict"):
        buffer.extend([{"a": 1}])
    assert (len(buffer), buffer.write_count) == (0, 0)


def test_what_cannot_be_is_refused_at_construction():
    for name, value in {"max_size": 0, "chunk_bytes": 100}.items():
        with pytest.raises(ValueError, match=f"{name}: expected"):
            RaggedStorage(**{"max_size": 5, name: value})
    with pytest.raises(ValueError, match=r"shared.*max_size.*RaggedStorage\(max_size\)"):
        ReplayBuffer(storage=RaggedStorage(), shared=True)


def test_without_a_limit_it_grows():
    buffer = ReplayBuffer(storage=RaggedStorage(), batch_size=2)
    buffer.extend(lazy_stack([TensorDict({"text": str(n)}) for n in range(500)]))
    assert len(buffer) == 500
    assert buffer[499]["text"] == "499"


@pytest.mark.parametrize("kind", KINDS)
def test_emptied_it_begins_again(kind):
    buffer = make(kind, 10)
    buffer.extend(records(0, 0, 25))
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(records(0, 25, 3))
    assert sorted(serials(buffer[:])) == [25, 26, 27]
    assert buffer.write_count == 28


# Samplers and writers --------------------------------------------------------------------------------

SAMPLERS = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(40, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=4, strict_length=False),
    "slices_without": lambda: SliceSamplerWithoutReplacement(slice_len=4, strict_length=False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_all_samplers_draw_whole_records(kind, sampler):
    buffer = make(kind, 40, sampler=SAMPLERS[sampler]())
    for start in range(0, 66, 11):
        buffer.extend(records(0, start, 11))
        batch = buffer.sample()
        found = [serial for _, serial in check_whole(batch)]
        if "slices" in sampler:
            ids = [int(element["collector", "traj_ids"]) for element in batch]
            begins = [bool(element["is_init"]) for element in batch]
            for n in range(1, len(found)):
                assert begins[n] or (found[n] == found[n - 1] + 1 and ids[n] == ids[n - 1])
        if sampler == "prioritized":
            buffer.update_priority(batch["index"], torch.rand(len(batch)))


@pytest.mark.parametrize("kind", KINDS)
def test_iteration_without_replacement_delivers_everything_once(kind):
    buffer = make(kind, 40, sampler=SamplerWithoutReplacement())
    buffer.extend(records(0, 0, 50))
    seen = [serial for batch in buffer for _, serial in check_whole(batch)]
    assert sorted(seen) == list(range(10, 50))


def test_a_sampler_of_slices_names_the_entry_that_an_element_lacks():
    buffer = make("private", 10, sampler=SliceSampler(slice_len=1, traj_key="log_probs"))
    with pytest.raises(KeyError, match="'log_probs': an element that is stored has no tensor of that name"):
        buffer.extend(records(0, 1, 3))
    buffer = make("private", 10, sampler=SliceSampler(slice_len=1, traj_key="tokens"))
    with pytest.raises(ValueError, match="'tokens': expected one shape in all elements"):
        buffer.extend(records(0, 0, 3))


def test_a_writer_that_ranks_elements():
    buffer = make("private", 2, writer=TensorDictMaxValueWriter("serial"))
    buffer.extend(lazy_stack([record(0, serial) for serial in (5, 1, 9, 3)]))
    assert sorted(serials(buffer[:])) == [5, 9]
    check_whole(buffer[:])


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_come_to_light_together_and_have_to_fit(kind):
    buffer = make(kind, 10)
    index = buffer.extend_pieces([records(0, 0, 3), records(0, 3, 4)])
    assert serials(buffer[index]) == list(range(7))
    with pytest.raises(ValueError, match="a trajectory of 12 frames is longer than the storage"):
        buffer.extend_pieces([records(0, 7, 6), records(0, 13, 6)])
    assert len(buffer) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_writes_whole_trajectories(kind):
    """The same as into a storage of tensors."""
    buffers = [make(kind, 200, sampler=SliceSampler(slice_len=4)), make("private", 200, storage=LazyTensorStorage(200))]
    for buffer in buffers:
        torch.manual_seed(0)
        options = {"frames_per_batch": 30, "total_frames": 90, "trajs_per_batch": 3}
        with Collector(CountingEnv(max_steps=5), replay_buffer=buffer, **options) as collector:
            for _ in collector:
                pass
    ragged, rows = buffers
    assert len(ragged) == ragged.write_count == rows.write_count > 50
    assert bool((ragged[:] == rows[:]).all())
    batch = ragged.sample()
    assert bool((batch["collector", "traj_ids"][1:4] == batch["collector", "traj_ids"][0]).all())


def test_transforms_are_applied_on_the_way_in_and_out():
    class Shout:
        def __call__(self, batch):
            return batch.set("serial", batch["serial"] + 1000)

        def inv(self, batch):
            return lazy_stack([one.copy().set("text", one["text"].upper()) for one in batch])

    buffer = ReplayBuffer(storage=RaggedStorage(5), batch_size=3, transform=Shout())
    buffer.extend(lazy_stack([TensorDict({"text": "ab" * n, "serial": n}) for n in (1, 2)]))
    assert list(buffer[:]["text"]) == ["AB", "ABAB"]
    assert set(serials(buffer.sample())) <= {1001, 1002}


# Copies and memory -----------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_copied_once_when_it_is_written(kind):
    """Its bytes are copied by one store into their row: no other memory of their size is taken."""
    num_bytes = 8_000_000
    batch = lazy_stack([TensorDict({"tokens": torch.arange(n, n + num_bytes // 16), "text": "a"}) for n in (0, 5)])
    buffer = ReplayBuffer(storage=RaggedStorage(4), batch_size=1, shared=kind == "shared")
    with Copies() as copies:
        tracemalloc.start()
        buffer.extend(batch)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert not [name for name in copies.called if any(word in name for word in ("clone", "copy", "contiguous", "cat"))]
    assert peak < (num_bytes if kind == "private" else 0) + 200_000  # shared rows lie in no memory of Python's
    assert torch.equal(buffer[1]["tokens"], batch[1]["tokens"])


def test_shared_memory_is_bounded_and_filled_again():
    size, chunk_bytes = 30, 1 << 14
    buffer = make("shared", size, chunk_bytes=chunk_bytes)
    lengths: list[int] = []
    for start in range(0, 3000, 10):
        batch = records(0, start, 10)
        lengths += [sum(len(part) for part in (one["text"],)) * 2 + 8 * len(one["tokens"]) for one in batch]
        buffer.extend(batch)
        if not start % 100:
            check_whole(buffer[:])
    most = max(sum(lengths[n : n + size + 10]) for n in range(len(lengths) - size)) + (size + 10) * 1500  # heads
    assert buffer.storage.num_bytes <= 2 * most + 3 * chunk_bytes
    assert sum(lengths) > 5 * buffer.storage.num_bytes


def test_elements_longer_than_chunks():
    buffer = make("shared", 6, chunk_bytes=4096)
    for start in range(0, 300, 3):
        buffer.extend(records(0, start, 3, longest=4000 if start % 2 else 100))
        check_whole(buffer[:])
    assert buffer.storage.num_bytes < 6 * 60_000
    for n in range(60):
        buffer[n % 6] = record(0, 1000 + n, 4000)
        check_whole(buffer[:])


def test_elements_of_every_length_around_a_chunk():
    buffer = make("shared", 5, chunk_bytes=4096)
    for step in range(200):
        batch = [TensorDict({"n": step, "t": torch.full((3000 + 8 * ((7 * step + k) % 200),), step)}) for k in range(3)]
        buffer.extend(lazy_stack([one.set("t", one["t"].to(torch.uint8)) for one in batch]))
        for one in buffer[:]:
            assert bool((one["t"] == int(one["n"])).all())


def test_memory_that_is_full_is_an_error_and_nothing_is_stored(monkeypatch):
    buffer = make("shared", 1000, chunk_bytes=4096)
    buffer.extend(records(0, 0, 3))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"No space left.*elements of a replay buffer need \d+ more chunks") as caught:
            buffer.extend(records(0, 3, 50))
    assert caught.value.errno == errno.ENOSPC
    assert buffer.write_count == 3
    buffer.extend(records(0, 3, 50))
    assert sorted(serial for _, serial in check_whole(buffer[:])) == list(range(53))


# Processes -----------------------------------------------------------------------------------------


def extend_in_child(buffer: ReplayBuffer, start: int, n: int) -> None:
    torch.set_num_threads(1)
    for at in range(start, start + n, 10):
        buffer.extend(records(1, at, 10))
    os._exit(0)


def test_what_another_process_writes_is_read_here():
    """In chunks that it made, and this process has not mapped."""
    buffer = make("shared", 300, chunk_bytes=1 << 14)
    buffer.extend(records(0, 0, 20))
    child = FORK.Process(target=extend_in_child, args=(buffer, 0, 200))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert sorted(check_whole(buffer[:])) == [(0, n) for n in range(20)] + [(1, n) for n in range(200)]
    buffer.extend(records(0, 20, 10))
    assert len(check_whole(buffer[:])) == 230


@pytest.mark.parametrize("sampler", ["random", "slices"])
def test_processes_write_while_this_one_samples(sampler):
    """In a ring so small that most rows are overwritten while they are read."""
    buffer = make("shared", 40, chunk_bytes=1 << 13, sampler=SAMPLERS[sampler]())
    buffer.extend(records(0, 0, 20))
    writers = [FORK.Process(target=extend_in_child, args=(buffer, 1000 * n, 400)) for n in range(2)]
    for writer in writers:
        writer.start()
    num_sampled = 0
    while any(writer.is_alive() for writer in writers):
        try:
            num_sampled += len(check_whole(buffer.sample()))
        except RuntimeError as error:  # the rows around what one writer writes are all reserved by the other
            assert "is empty" in str(error)  # noqa: PT017
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert num_sampled
    assert buffer.write_count == 820
    check_whole(buffer[:])


def test_a_buffer_in_use_is_shared_with_what_it_holds():
    buffer = make("private", 30, sampler=SliceSampler(slice_len=2))
    buffer.extend(records(0, 0, 40))
    before = check_whole(buffer[:])
    buffer.share()
    buffer.share()
    assert check_whole(buffer[:]) == before
    child = FORK.Process(target=extend_in_child, args=(buffer, 0, 20))
    child.start()
    child.join(60)
    assert sorted(check_whole(buffer[:])) == [(0, n) for n in range(30, 40)] + [(1, n) for n in range(20)]
    check_whole(buffer.sample())


def test_nothing_is_left_of_it():
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        buffer = make("shared", 50)
        buffer.extend(records(0, 0, 10))
        twin = copy.deepcopy(buffer)
        twin.extend(records(0, 10, 10))
        assert len(buffer) == 20
        del buffer, twin
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_fds


def test_a_copy_of_a_private_one_is_its_own():
    buffer = make("private", 50)
    buffer.extend(records(0, 0, 10))
    twin = copy.deepcopy(buffer)
    twin.extend(records(0, 10, 10))
    assert (len(buffer), len(twin)) == (10, 20)


# State ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other_kind", KINDS)
def test_saved_and_loaded_without_a_pickle(kind, other_kind, tmp_path):
    buffer = make(kind, 30)
    buffer.extend(records(0, 0, 47))
    buffer.dumps(tmp_path / "saved")
    other = make(other_kind, 30)
    other.extend(records(9, 0, 5))
    other.loads(tmp_path / "saved")
    assert check_whole(other[:]) == check_whole(buffer[:])
    assert (len(other), other.write_count) == (30, 47)
    other.extend(records(0, 47, 5))
    assert sorted(serial for _, serial in check_whole(other[:])) == list(range(22, 52))


def test_a_state_with_a_gap():
    buffer = make("shared", 30)
    buffer.extend(records(0, 0, 10))
    ledger = buffer.storage.ledger
    ledger.abandon(ledger.reserve(4))
    buffer.extend(records(0, 10, 10))
    other = make("private", 30)
    other.load_state_dict(buffer.state_dict())
    assert check_whole(other[:]) == check_whole(buffer[:])
    assert len(other) == 20


def test_a_damaged_file_is_an_error(tmp_path):
    buffer = make("private", 30)
    buffer.extend(records(0, 0, 10))
    buffer.dumps(tmp_path / "saved")
    [file] = [found for found in (tmp_path / "saved").iterdir() if found.name == "elements.pt"]
    content = bytearray(file.read_bytes())
    content[content.index(b"traj_ids") + 30] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedFileError):
        buffer.loads(tmp_path / "saved")
    check_whole(buffer[:])


def test_states_of_other_storages_are_loaded_and_its_own_by_none():
    data = TensorDict({"serial": torch.arange(5), "obs": torch.randn(5, 3)}, [5])
    for storage in (LazyTensorStorage(10), ListStorage(10)):
        source = ReplayBuffer(storage=storage, batch_size=2)
        source.extend(data)
        buffer = ReplayBuffer(storage=RaggedStorage(10), batch_size=2)
        buffer.load_state_dict(source.state_dict())
        assert bool((buffer[:] == data).all())
        with pytest.raises(ValueError, match="encoded elements into a RaggedStorage"):
            source.load_state_dict(buffer.state_dict())


def test_its_segments_have_no_name():
    assert Segment().path is None
    buffer = make("shared", 10)
    buffer.extend(records(0, 0, 3))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "rollwright" in line]
    assert mapped
    assert all("memfd:" in line and "(deleted)" in line for line in mapped)


@pytest.mark.parametrize("options", [(), ("--json",), ("--check",)])
@pytest.mark.parametrize("kind", [*KINDS, "empty", "mixed"])
def test_inspect_describes_a_folder_of_it(kind, options, tmp_path, capsys):
    buffer = make(kind, 30)
    if kind == "mixed":
        buffer.add(TensorDict({"text": "alone"}))
    if kind != "empty":
        buffer.extend(records(0, 0, 20))
    buffer.dumps(tmp_path / "saved")
    lacks_flags = kind == "mixed" and "--check" in options  # which not every element has
    assert main(["inspect", str(tmp_path / "saved"), *options]) == int(lacks_flags)
    shown = capsys.readouterr().out
    assert kind == "empty" or lacks_flags or "text" in shown
    assert kind in ("empty", "mixed") or "tokens" in shown


def test_inspect_notices_damage(tmp_path, capsys):
    buffer = make("private", 30)
    buffer.extend(records(0, 0, 10))
    buffer.dumps(tmp_path / "saved")
    state = torch.load(tmp_path / "saved" / "elements.pt", weights_only=True)
    state["elements"]["rows"][100] ^= 1
    torch.save(state, tmp_path / "saved" / "elements.pt")
    assert main(["inspect", str(tmp_path / "saved")]) == 1
    assert "checksum" in capsys.readouterr().err


def test_tensors_and_tensordicts_in_one_buffer_are_a_list_in_any_order():
    buffer = ReplayBuffer(storage=RaggedStorage(10), batch_size=4)
    buffer.extend([torch.tensor(1.0), TensorDict({"a": torch.tensor(2.0)})])
    for index in ([0, 1], [1, 0]):
        found = buffer[index]
        assert isinstance(found, list)
        assert [isinstance(item, torch.Tensor) for item in found] == [place == 0 for place in index]
