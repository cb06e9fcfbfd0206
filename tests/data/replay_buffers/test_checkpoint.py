"""Saving: a buffer that was restored holds the same and samples the same, to the bit."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import threading

import pytest
import torch
from tensordict import TensorDict
from tests.processes.forked import resting_fork
from tests.variants import in_turn

from rollwright.data import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RaggedStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from rollwright.data.replay_buffers import checkpoint
from rollwright.data.replay_buffers.storages import saving
from rollwright.errors import DamagedFileError

FORK = multiprocessing.get_context("fork")
SIZE = 40
STORAGES = {
    "tensor": lambda: LazyTensorStorage(SIZE),
    "memmap": lambda: LazyMemmapStorage(SIZE),
    "list": lambda: ListStorage(SIZE),
    "grid": lambda: LazyTensorStorage(SIZE, ndim=2),
    "shared": lambda: LazyTensorStorage(SIZE),
    "ragged": lambda: RaggedStorage(SIZE),
    "ragged-shared": lambda: RaggedStorage(SIZE),
}
SAMPLERS = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "without_order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "prioritized": lambda: PrioritizedSampler(SIZE, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=4),
    "slices_without": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "slices_prioritized": lambda: PrioritizedSliceSampler(SIZE, 0.7, 0.5, slice_len=4),
}


def frames(n: int, start: int = 0) -> TensorDict:
    serial = torch.arange(start, start + n)
    return TensorDict({"serial": serial, "collector": {"traj_ids": serial // 7}, "obs": torch.randn(n, 3)}, [n])


def make(storage: str, sampler: str, **options) -> ReplayBuffer:
    return TensorDictReplayBuffer(
        storage=STORAGES[storage](),
        sampler=SAMPLERS[sampler](),
        batch_size=8,
        generator=torch.Generator().manual_seed(1),
        shared="shared" in storage,
        **options,
    )


def write(buffer: ReplayBuffer, n: int, start: int = 0) -> torch.Tensor:
    data = frames(n, start)
    return buffer.extend(data if buffer.storage.ndim == 1 else torch.stack([data, data.apply(lambda x: x + 1000)]))


def used(storage: str, sampler: str) -> ReplayBuffer:
    """A buffer that has wrapped around, in the middle of everything."""
    torch.manual_seed(0)
    buffer = make(storage, sampler)
    for n in range(3):
        index = write(buffer, 17, 17 * n)
        buffer.update_priority(index, torch.rand(len(index)))
        buffer.sample()
    return buffer


def assert_go_on_alike(one: ReplayBuffer, other: ReplayBuffer) -> None:
    assert (len(one), one.write_count) == (len(other), other.write_count)
    assert bool((one[:] == other[:]).all())
    for n in range(4):
        batch, twin = one.sample(), other.sample()
        assert batch.shape == twin.shape
        assert set(batch.keys(True, True)) == set(twin.keys(True, True))
        assert bool((batch == twin).all()), batch
        if n == 1:
            torch.manual_seed(5)
            first = write(one, 5, 100)
            torch.manual_seed(5)
            assert torch.equal(first, write(other, 5, 100))
        if n == 2:
            priority = torch.rand(len(batch))
            for buffer in (one, other):
                buffer.update_priority(batch["index"], priority)


@pytest.mark.parametrize(("storage", "sampler"), in_turn(STORAGES, list(SAMPLERS)))
def test_a_state_that_went_through_a_file_is_gone_on_from_to_the_bit(storage, sampler, tmp_path):
    buffer = used(storage, sampler)
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    other = make(storage, sampler)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_go_on_alike(buffer, other)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_dump_is_gone_on_from_to_the_bit(storage, sampler, tmp_path):
    buffer = used(storage, sampler)
    buffer.dumps(tmp_path / "saved")
    other = make(storage, sampler)
    other.loads(tmp_path / "saved")
    assert_go_on_alike(buffer, other)


def test_a_state_is_a_copy():
    buffer = used("tensor", "prioritized")
    state = buffer.state_dict()
    before = buffer[:]
    write(buffer, 30, 500)
    buffer.update_priority(torch.arange(SIZE), torch.zeros(SIZE))
    other = make("tensor", "prioritized")
    other.load_state_dict(state)
    assert bool((other[:] == before).all())
    assert len(other.sample()["serial"].unique()) > 1


@pytest.mark.parametrize("storage", STORAGES)
def test_an_empty_buffer_is_saved_and_restored(storage, tmp_path):
    buffer = make(storage, "random")
    buffer.dumps(tmp_path / "saved")
    other = used(storage, "random")
    other.loads(tmp_path / "saved")
    assert len(other) == 0
    write(other, 3)
    assert len(other) == 3 * other.storage.columns


def test_a_state_moves_between_kinds_of_storage(tmp_path):
    buffer = used("tensor", "slices")
    for kind in ("memmap", "shared"):
        other = make(kind, "slices")
        other.load_state_dict(buffer.state_dict())
        assert bool((other[:] == buffer[:]).all())
        buffer = other


def test_time_along_an_inner_dimension_is_remembered():
    """With dim_extend=0 each row of [B, T] is one run of frames, and rows do not go on in the next."""
    buffer, other = (
        ReplayBuffer(
            storage=LazyTensorStorage(24, ndim=2),
            sampler=SliceSampler(slice_len=3, end_key="end"),
            dim_extend=0,
            batch_size=30,
        )
        for _ in range(2)
    )
    data = TensorDict({"serial": torch.arange(12).reshape(3, 4), "end": torch.zeros(3, 4, dtype=torch.bool)}, [3, 4])
    buffer.extend(data)
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(other[:]["serial"], data["serial"])
    for one in (buffer, other):
        slices = one.sample()["serial"].reshape(10, 3)
        assert (slices.diff() == 1).all()
        assert (slices[:, 0] // 4 == slices[:, -1] // 4).all()


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "grid"])
def test_gaps_are_remembered(storage):
    buffer = make(storage, "random")
    write(buffer, 10)
    ledger = buffer.storage.ledger
    ledger.abandon(ledger.reserve(4))
    write(buffer, 5, 10)
    other = make(storage, "random")
    other.load_state_dict(buffer.state_dict())
    assert len(other) == len(buffer) == 15
    assert other.write_count == 15
    assert other[:]["serial"].tolist() == list(range(15))
    assert set(other.sample(300)["serial"].tolist()) == set(range(15))


def test_a_loaded_buffer_in_place_of_a_used_one():
    buffer, other = used("tensor", "slices"), used("tensor", "slices")
    write(other, 23, 2000)
    other.sample()
    other.load_state_dict(buffer.state_dict())
    assert_go_on_alike(buffer, other)


def test_the_writer_of_the_largest_is_saved(tmp_path):
    buffer, other = (
        ReplayBuffer(storage=LazyTensorStorage(5), writer=TensorDictMaxValueWriter("serial"), batch_size=3)
        for _ in range(2)
    )
    buffer.extend(frames(9))
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    other.extend(frames(7))
    assert sorted(other[:]["serial"].tolist()) == [5, 6, 6, 7, 8]


def test_a_memory_mapped_buffer_is_dumped_where_it_lies(tmp_path):
    def make_mapped(existsok: bool) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "rows", existsok=existsok),
            sampler=SamplerWithoutReplacement(),
            batch_size=8,
            generator=torch.Generator().manual_seed(1),
        )

    buffer = make_mapped(False)
    write(buffer, 30)
    buffer.sample()
    buffer.dumps(tmp_path / "rows")
    expected = [buffer.sample()["serial"].tolist() for _ in range(4)]
    other = make_mapped(True)
    other.loads(tmp_path / "rows")
    assert [other.sample()["serial"].tolist() for _ in range(4)] == expected


# Folders -----------------------------------------------------------------------------------------


def test_a_dump_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path):
    buffer = used("tensor", "random")
    buffer.dumps(tmp_path / "deep" / "saved")
    write(buffer, 3, 900)
    buffer.dumps(tmp_path / "deep" / "saved")
    other = make("tensor", "random")
    other.loads(tmp_path / "deep" / "saved")
    assert_go_on_alike(buffer, other)
    assert os.listdir(tmp_path / "deep") == ["saved"]


def test_a_folder_of_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="other files"):
        used("tensor", "random").dumps(tmp_path)
    assert os.listdir(tmp_path) == ["notes"]


@pytest.mark.parametrize(("first", "second"), [("tensor", "tensor"), ("tensor", "list"), ("list", "tensor")])
def test_a_second_dump_replaces_its_own_files_alone(first, second, tmp_path):
    folder = tmp_path / "saved"
    used(first, "random").dumps(folder)
    (folder / "policy.pt").write_text("mine")
    (folder / "plots" / "of.today").mkdir(parents=True)
    (folder / "plots" / "of.today" / "loss.png").write_text("mine")
    (folder / "latest").symlink_to("policy.pt")
    used(second, "random").dumps(folder / "of_a_task")
    buffer = used(second, "random")
    buffer.dumps(folder)
    assert (folder / "latest").read_text() == "mine"
    assert (folder / "plots" / "of.today" / "loss.png").read_text() == "mine"
    for saved in (folder, folder / "of_a_task"):
        other = make(second, "random")
        other.loads(saved)
        assert bool((other[:] == buffer[:]).all())
    assert len(list(folder.glob("*.pt"))) == (2 if second == "tensor" else 3)  # none of the first
    assert os.listdir(tmp_path) == ["saved"]


def test_files_of_a_name_that_dumps_have_are_no_dump(tmp_path):
    (tmp_path / "state.pt").write_text("that of my optimizer")
    with pytest.raises(FileExistsError, match="other files"):
        used("tensor", "random").dumps(tmp_path)
    assert (tmp_path / "state.pt").read_text() == "that of my optimizer"


def test_files_of_users_come_back_out_of_a_folder_that_stepped_aside(tmp_path):
    """A kill after the new dump has taken the place of the old one, and a file that was written there since then."""
    buffer, folder = used("tensor", "random"), tmp_path / "saved"
    aside = tmp_path / ".saved-rollwright-replaced"
    for place in (folder, aside):
        buffer.dumps(place)
        (place / "runs").mkdir()
        (place / "runs" / "both").write_text(place.name)
        (place / "runs" / place.name).write_text("mine")
    saving.recover(folder)
    assert (folder / "runs" / "both").read_text() == "saved"
    assert sorted(os.listdir(folder / "runs")) == sorted(["both", aside.name, "saved"])
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("storage", ["tensor", "list"])
@pytest.mark.parametrize("calls", range(20))
def test_a_kill_in_the_middle_of_a_dump_leaves_a_whole_one(storage, calls, tmp_path):
    """The process is killed at its n-th call that changes files."""
    old, new = make(storage, "random"), make(storage, "random")
    write(old, 10)
    write(new, 20, 100)
    old.dumps(tmp_path / "saved")
    (tmp_path / "saved" / "policy.pt").write_text("mine")

    def dump_and_die() -> None:
        left = calls

        def deadly(call):
            def counted(*args, **kwargs):
                nonlocal left
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return call(*args, **kwargs)

            return counted

        for name in ("replace", "rename", "ftruncate", "fsync", "unlink", "rmdir", "mkdir", "open"):
            setattr(os, name, deadly(getattr(os, name)))
        torch.save = deadly(torch.save)
        new.dumps(tmp_path / "saved")

    child = FORK.Process(target=dump_and_die)
    child.start()
    child.join(60)
    assert child.exitcode in (-signal.SIGKILL, 0)
    other = make(storage, "random")
    other.loads(tmp_path / "saved")
    held = other[:]["serial"].tolist()
    assert (tmp_path / "saved" / "policy.pt").read_text() == "mine"
    assert held in (list(range(10)), list(range(100, 120)))
    if child.exitcode == 0:
        assert held[0] == 100
    new.dumps(tmp_path / "saved")  # and the next one goes through
    other.loads(tmp_path / "saved")
    assert other[:]["serial"].tolist() == list(range(100, 120))
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("storage", ["tensor", "list"])
def test_what_a_killed_dump_leaves_is_removed_by_whoever_comes_next(storage, tmp_path, monkeypatch):
    buffer = make(storage, "random")
    write(buffer, 10)
    buffer.dumps(tmp_path / "saved")
    mine = [tmp_path / ".saved-old", tmp_path / ".saved-rollwright-notes", tmp_path / ".saved"]
    for folder in mine:
        folder.mkdir()

    def killed_at(name: str) -> None:
        def dump_and_die() -> None:
            monkeypatch.setattr(checkpoint, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            buffer.dumps(tmp_path / "saved")

        child = FORK.Process(target=dump_and_die, daemon=True)
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL

    uses = {
        "dumps": lambda: buffer.dumps(tmp_path / "saved"),
        "loads": lambda: make(storage, "random").loads(tmp_path / "saved"),
    }
    if storage == "tensor":
        uses["storage"] = lambda: LazyMemmapStorage(SIZE, scratch_dir=tmp_path / "saved", existsok=True)
    for use in uses.values():
        killed_at("save")
        killed_at("state_of")
        assert len(os.listdir(tmp_path)) == 4 + 1  # that of the first is removed by the second
        use()
        assert sorted(os.listdir(tmp_path)) == sorted(["saved", *(folder.name for folder in mine)])


def test_a_dump_under_way_is_left_alone(tmp_path, monkeypatch):
    """Another process that dumps to the same folder meanwhile removes nothing of this one."""
    buffer, save = used("tensor", "random"), checkpoint.save
    buffer.dumps(tmp_path / "saved")

    def meanwhile(*args: object) -> None:
        save(*args)
        monkeypatch.setattr(checkpoint, "save", save)
        child = FORK.Process(target=lambda: (buffer.dumps(tmp_path / "saved"), os._exit(7)), daemon=True)
        child.start()
        child.join(60)
        assert child.exitcode == 7

    monkeypatch.setattr(checkpoint, "save", meanwhile)
    buffer.dumps(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    other = make("tensor", "random")
    other.loads(tmp_path / "saved")
    assert_go_on_alike(buffer, other)


def test_nothing_to_load_is_an_error_that_says_so(tmp_path):
    buffer = make("tensor", "random")
    with pytest.raises(FileNotFoundError, match=r"path.*dumps\(\)"):
        buffer.loads(tmp_path)
    with pytest.raises(KeyError, match="state_dict"):
        buffer.load_state_dict({"storage": None})
    with pytest.raises(KeyError, match="state_dict"):
        buffer.load_state_dict({**buffer.state_dict(), "storage": {"low": 0}})


def test_a_state_that_does_not_fit_is_an_error_and_changes_nothing():
    state = used("tensor", "random").state_dict()
    small = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    small.extend(frames(4))
    with pytest.raises(ValueError, match=r"state_dict.*10.*max_size=40"):
        small.load_state_dict(state)
    other = ReplayBuffer(storage=LazyTensorStorage(SIZE), batch_size=3)
    other.extend(TensorDict({"other": torch.arange(4)}, [4]))
    with pytest.raises(KeyError, match="Missing"):
        other.load_state_dict(state)
    flat = ReplayBuffer(storage=LazyTensorStorage(SIZE))
    grid = ReplayBuffer(storage=LazyTensorStorage(SIZE, ndim=2))
    grid.extend(torch.zeros(2, 3))
    for one, saved in ((flat, grid.state_dict()), (grid, state)):
        with pytest.raises(ValueError, match=rf"ndim={one.storage.ndim} .*, got ndim={3 - one.storage.ndim}"):
            one.load_state_dict(saved)
    assert len(small) == len(other) == 4
    assert other.sample()["other"].max() < 4


@pytest.mark.parametrize("saved", ["random", "without", "slices_without", "prioritized"])
@pytest.mark.parametrize("sampler", ["without", "slices_without", "prioritized", "consuming", "staleness"])
def test_a_state_of_another_sampler_is_an_error_and_changes_nothing(saved, sampler):
    if saved == sampler:
        return
    made = {**SAMPLERS, "consuming": ConsumingSampler, "staleness": StalenessAwareSampler}[sampler]()
    buffer = ReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=made, batch_size=4)
    buffer.extend(frames(4, 500))
    with pytest.raises((KeyError, ValueError), match=rf"the state of a {type(made).__name__}, got .* set_sampler\(\)"):
        buffer.load_state_dict(used("tensor", saved).state_dict())
    assert buffer[:]["serial"].tolist() == [500, 501, 502, 503]


@pytest.mark.parametrize("state", [None, 3, "left"])
def test_a_state_of_a_sampler_that_is_no_dictionary_is_an_error(state):
    buffer = used("tensor", "random")
    with pytest.raises(TypeError, match="state_dict: expected the state of a RandomSampler, a dictionary"):
        buffer.load_state_dict({**buffer.state_dict(), "sampler": state})


@pytest.mark.parametrize("dim", [0, 1])
def test_tensors_in_two_dimensions_are_saved(dim):
    buffer, other = (
        ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), batch_size=3, dim_extend=dim) for _ in range(2)
    )
    shape = (2, 3) if dim else (3, 2)
    for n in range(3):
        buffer.extend(torch.arange(6).reshape(shape) + 10 * n)
    other.load_state_dict(buffer.state_dict())
    assert torch.equal(other[:], buffer[:])
    for one in (buffer, other):
        one.extend(torch.arange(6).reshape(shape) + 50)
    assert torch.equal(other[:], buffer[:])


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_rows_along_another_dimension_are_refused(how, tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0)
    buffer.extend(torch.arange(6).reshape(2, 3))
    other = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    same = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0)
    buffer.dumps(tmp_path / "saved")

    def load(into):
        return into.load_state_dict(buffer.state_dict()) if how == "state_dict" else into.loads(tmp_path / "saved")

    with pytest.raises(ValueError, match=r"dim_extend=1, got dim_extend=0. Make the buffer with dim_extend=0"):
        load(other)
    load(same)
    assert torch.equal(same[:], buffer[:])


def test_a_state_is_that_of_one_moment(monkeypatch):
    sampler = PrioritizedSampler(100, 1.0, 1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
    buffer.extend(torch.arange(5))
    started, taken = threading.Event(), sampler.state_dict
    thread = threading.Thread(target=lambda: (started.set(), buffer.extend(torch.arange(7))))

    def state_dict():
        state = taken()
        if not thread.ident:
            thread.start()
            started.wait()
            thread.join(0.2)  # it waits for the state
        return state

    monkeypatch.setattr(sampler, "state_dict", state_dict)
    state = buffer.state_dict()
    thread.join()
    assert (state["sampler"]["high"], state["storage"]["high"]) == (5, 5)
    assert len(state["sampler"]["priorities"]) == len(state["storage"]["elements"]) == 5
    assert buffer.state_dict()["sampler"]["high"] == 12


def test_a_state_has_priorities_for_what_was_written_without_a_word():
    sampler = PrioritizedSampler(100, 1.0, 1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
    buffer.storage.append(torch.arange(5))  # as another process does
    assert buffer.state_dict()["sampler"]["priorities"].tolist() == [1.0] * 5


def test_a_folder_that_stepped_aside_is_found_by_a_storage_too(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(torch.arange(4))
    buffer.dumps(tmp_path / "saved")
    (tmp_path / "saved").rename(
        tmp_path / ".saved-rollwright-replaced"
    )  # as a kill between the two steps of dumps leaves it
    storage = LazyMemmapStorage(scratch_dir=tmp_path / "saved", existsok=True)
    assert storage.num_reopened == 4
    other = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    other.loads(tmp_path / "saved")
    assert other[:].tolist() == [0, 1, 2, 3]


def test_a_child_that_was_forked_during_a_dump_holds_up_nobody(tmp_path):
    with contextlib.ExitStack() as children:
        with saving._swapping(tmp_path / "rows"):
            children.enter_context(resting_fork())
        lock = saving._locked(tmp_path)
        assert lock is not None
        os.close(lock)


@pytest.mark.parametrize("left", [None, b""], ids=["missing", "empty"])
def test_a_dump_without_its_rows_is_damaged(left, tmp_path):
    used("tensor", "random").dumps(tmp_path / "dump")
    rows = tmp_path / "dump" / "buffer.rows"
    rows.unlink()
    if left is not None:
        rows.write_bytes(left)
    with pytest.raises(DamagedFileError, match=r"buffer\.rows is (missing|empty): it holds the elements"):
        make("tensor", "random").loads(tmp_path / "dump")


def test_a_state_in_which_torch_seeks_in_vain_is_damaged(tmp_path, monkeypatch):
    used("tensor", "random").dumps(tmp_path / "dump")

    def load(*args, **kwargs):
        raise OSError(errno.EINVAL, "Invalid argument")  # where a number of the file says a place that there is not

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(DamagedFileError, match=r"state\.pt is damaged"):
        make("tensor", "random").loads(tmp_path / "dump")
