"""A storage that was emptied takes the entries of whatever is written next, in all processes that have it."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tests.processes.forked import SERVED

from rollwright.collectors import Collector, MultiAsyncCollector
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from rollwright.envs import GymEnv

KINDS = ["tensor", "memmap", "shared", "folder"]
DEADLINE_S = 60


def make_buffer(kind: str, folder, **options) -> ReplayBuffer:
    if kind in ("tensor", "shared"):
        storage = LazyTensorStorage(6)
    else:
        storage = LazyMemmapStorage(6, scratch_dir=folder / "rows" if kind == "folder" else None)
    return ReplayBuffer(storage=storage, batch_size=4, shared=kind == "shared", **options)


def first(n: int) -> TensorDict:
    return TensorDict({"obs": torch.arange(n), "kept": torch.ones(n, 2)}, [n])


def other(n: int, start: int = 0) -> TensorDict:
    """Other entries: one less, one more, and one of another shape and dtype."""
    serial = torch.arange(start, start + n)
    ids = {"traj_ids": torch.zeros(n, dtype=torch.int64)}
    return TensorDict({"obs": serial.unsqueeze(-1).expand(n, 3).double(), "collector": ids}, [n])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_after_empty_may_have_other_entries(kind, tmp_path):
    buffer = make_buffer(kind, tmp_path)
    buffer.extend(first(4))
    with pytest.raises(KeyError, match=r"Missing: 'kept'; unknown: .*traj_ids"):
        buffer.extend(other(1))
    for _ in range(3):  # back and forth
        buffer.empty()
        buffer.extend(other(8))  # around the seam
        assert torch.equal(buffer[:]["obs"], other(8)[2:]["obs"])
        with pytest.raises(KeyError, match="Missing:"):
            buffer.extend(first(1))
        buffer.empty()
        buffer.extend(first(3))
        assert buffer[:]["obs"].tolist() == [0, 1, 2]
        assert buffer.sample()["kept"].shape == (4, 2)
    assert buffer.write_count == 4 + 3 * 11


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_may_have_other_entries_too(kind, tmp_path):
    buffer = make_buffer(kind, tmp_path)
    buffer.add(first(1)[0])
    buffer.empty()
    buffer.add(other(1)[0])
    assert buffer[0]["obs"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_samplers_look_again_for_what_distinguishes_trajectories(kind, tmp_path):
    buffer = make_buffer(kind, tmp_path, sampler=SliceSampler(slice_len=2))
    buffer.extend(first(4))
    with pytest.raises(KeyError, match="traj_key, end_key"):
        buffer.sample()
    buffer.empty()
    buffer.extend(other(4))
    assert buffer.sample()["obs"][:, 0].diff()[::2].tolist() == [1, 1]


def test_rows_of_the_same_entries_are_written_again():
    buffer = make_buffer("tensor", None)
    buffer.extend(first(4))
    rows = buffer.storage._storage["obs"].data_ptr()
    buffer.empty()
    buffer.extend(first(4))
    assert buffer.storage._storage["obs"].data_ptr() == rows


def test_rows_of_another_shape_stay_an_error():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), batch_size=4)
    buffer.extend(TensorDict({"obs": torch.zeros(2, 3)}, [2, 3]))
    buffer.empty()
    buffer.extend(TensorDict({"next": torch.zeros(2, 3)}, [2, 3]))
    buffer.empty()
    with pytest.raises(ValueError, match="expected 'next' of shape"):
        buffer.extend(TensorDict({"next": torch.zeros(4, 3)}, [4, 3]))


def test_who_has_the_file_open_sees_the_new_entries(tmp_path):
    one = make_buffer("folder", tmp_path)
    one.extend(first(4))
    two = ReplayBuffer(storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "rows", existsok=True), batch_size=4)
    assert two.sample().keys() == {"obs", "kept"}
    one.empty()
    two.extend(other(2))
    assert torch.equal(one[:]["obs"], other(2)["obs"])
    one.extend(other(2, start=2))
    assert torch.equal(two[:]["obs"], other(4)["obs"])
    assert LazyMemmapStorage(6, scratch_dir=tmp_path / "rows", existsok=True).num_reopened == 4


def test_who_was_about_to_write_the_old_entries_is_refused(tmp_path):
    one = make_buffer("folder", tmp_path)
    one.extend(first(1))
    one.empty()
    two = LazyMemmapStorage(6, scratch_dir=tmp_path / "rows", existsok=True)
    reserve = one.storage.ledger.reserve

    def late(*args):
        one.storage.ledger.reserve = reserve
        two.append(other(2))
        return reserve(*args)

    one.storage.ledger.reserve = late
    with pytest.raises(RuntimeError, match="emptied meanwhile"):
        one.extend(first(1))
    assert torch.equal(one[:]["obs"], other(2)["obs"])


def write_other(buffer: ReplayBuffer) -> None:
    buffer.extend(other(4))


def test_another_process_may_write_other_entries():
    buffer = make_buffer("shared", None)
    buffer.extend(first(4))
    buffer.empty()
    process = SERVED.Process(target=write_other, args=(buffer,), daemon=True)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert torch.equal(buffer[:]["obs"], other(4)["obs"])


def test_workers_fill_a_buffer_that_was_settled_with_a_rollout():
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=10, shared=True)
    buffer.extend(GymEnv("CartPole-v1").rollout(2))
    buffer.empty()
    collector = MultiAsyncCollector(
        [lambda: GymEnv("CartPole-v1")], frames_per_batch=20, total_frames=40, replay_buffer=buffer
    )
    try:
        for _ in collector:
            pass
    finally:
        collector.shutdown()
    assert len(buffer) == 40
    assert buffer.sample()["collector", "traj_ids"].shape == (10,)


def test_who_writes_while_a_storage_is_shared_goes_on(monkeypatch):
    buffer = make_buffer("tensor", None)
    buffer.extend(first(2))
    storage, check = buffer.storage, buffer.storage._check

    def share_first(*args):
        buffer.share()  # another object says what rows hold, before rows are reserved
        return check(*args)

    monkeypatch.setattr(storage, "_check", share_first)
    buffer.extend(first(3))
    assert len(buffer) == 5


def test_a_collector_writes_into_no_rows_that_others_have_begun(monkeypatch):
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    storage, reserve = buffer.storage, buffer.storage.reserve

    def others_first(rows):
        if not len(storage):
            buffer.extend(other(20))
        return reserve(rows)

    monkeypatch.setattr(storage, "reserve", others_first)
    collector = Collector(lambda: GymEnv("CartPole-v1"), None, frames_per_batch=10, replay_buffer=buffer)
    with pytest.raises(KeyError, match="Missing: "):
        next(iter(collector))
    collector.shutdown()
    assert torch.equal(buffer[:]["obs"], other(20)["obs"])
    assert len(buffer) == 20
