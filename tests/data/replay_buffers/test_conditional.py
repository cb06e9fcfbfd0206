"""An element that was overwritten since it was drawn is not changed: neither its priority nor its entries."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def frames(n: int, start: int = 0) -> TensorDict:
    return TensorDict(
        {
            "obs": torch.arange(start, start + n),
            "value": torch.zeros(n, 1),
            "version": torch.zeros(n, dtype=torch.int64),
        },
        [n],
    )


def tracking(size: int = 8, storage=LazyTensorStorage, **options) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=storage(size, **options.pop("of_storage", {})),
        writer=RoundRobinWriter(track_generations=True),
        **{"batch_size": 8, "sampler": SamplerWithoutReplacement(shuffle=False), **options},
    )


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_generations_count_how_often_a_place_was_written(storage):
    buffer = tracking(storage=storage)
    buffer.extend(frames(8))
    batch, info = buffer.sample(return_info=True)
    assert batch["index_generation"].tolist() == info["index_generation"].tolist() == [0] * 8
    buffer.extend(frames(3, 8))
    batch = buffer.sample()
    by_place = dict(zip(batch["index"].tolist(), batch["index_generation"].tolist(), strict=True))
    assert by_place == {0: 1, 1: 1, 2: 1, 3: 0, 4: 0, 5: 0, 6: 0, 7: 0}
    buffer[0] = frames(1, 50)[0]
    assert dict(zip(*(buffer.sample()[key].tolist() for key in ("index", "index_generation")), strict=True))[0] == 1


def test_other_writers_track_nothing():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    buffer.extend(frames(8))
    assert "index_generation" not in buffer.sample().keys()  # noqa: SIM118
    with pytest.raises(RuntimeError, match=r"RoundRobinWriter.*track_generations=True"):
        buffer.update_if_present(index=[0], generation=[0], patch={"value": torch.ones(1, 1)})


def test_entries_of_what_was_overwritten_stay():
    buffer = tracking()
    buffer.extend(frames(8))
    batch = buffer.sample()
    buffer.extend(frames(3, 8))
    result = buffer.update_if_present(
        index=batch["index"], generation=batch["index_generation"], patch={"value": torch.ones(8, 1)}
    )
    assert result.updated.tolist() == [False] * 3 + [True] * 5
    assert (result.updated_count, result.stale_count, result.version_rejected) == (5, 3, None)
    assert result.version_rejected_count == 0
    assert buffer[:]["value"].reshape(-1).tolist() == [0.0] * 3 + [1.0] * 5
    assert buffer[:]["obs"].tolist() == [8, 9, 10, 3, 4, 5, 6, 7]
    again = buffer.update_if_present(
        index=batch["index"],
        generation=batch["index_generation"],
        patch=TensorDict({"value": torch.ones(8, 1)}, [8]),
    )
    assert again.updated_count == 5  # a change leaves the element what it is


def test_what_was_dropped_or_is_negative_stays():
    buffer = tracking()
    buffer.extend(frames(4))
    batch = buffer.sample(4)
    buffer.empty()
    given = {"index": batch["index"], "generation": batch["index_generation"], "patch": {"value": torch.ones(4, 1)}}
    assert buffer.update_if_present(**given).updated_count == 0
    buffer.extend(frames(6, 4))  # fills the ring up, and goes on at its start
    assert buffer.update_if_present(**given).updated_count == 0
    assert not bool(buffer[:]["value"].any())
    none = buffer.update_if_present(index=[-1], generation=[-1], patch={"value": torch.ones(1, 1)})
    assert none.updated_count == 0


def test_several_dimensions():
    buffer = tracking(16, of_storage={"ndim": 2}, batch_size=16)
    data = TensorDict({"value": torch.zeros(2, 8)}, [2, 8])
    buffer.extend(data)
    batch = buffer.sample()
    buffer.extend(data[:, :3])
    result = buffer.update_if_present(
        index=batch["index"], generation=batch["index_generation"], patch={"value": torch.ones(16)}
    )
    assert result.updated_count == 10
    assert buffer[:]["value"].sum() == 10


def test_a_patch_of_a_batch_goes_with_the_index_that_writing_it_gave():
    buffer = tracking(8, of_storage={"ndim": 2})
    batch = frames(6).reshape(2, 3)
    index = buffer.extend(batch)
    versions = torch.tensor([[1, 1, -1], [1, 1, 1]])
    result = buffer.update_if_present(
        index=index,
        generation=buffer.writer.generations_of(index),
        patch={"value": batch["obs"][..., None].float()},
        version_key="version",
        version=versions,
    )
    assert result.updated_count == 5
    assert result.version_rejected.reshape(3, 2).T.tolist() == (versions < 0).tolist()
    assert buffer[:]["value"][..., 0].tolist() == [[0.0, 1.0, 0.0], [3.0, 4.0, 5.0]]


def test_a_patch_may_be_nested():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), writer=RoundRobinWriter(track_generations=True))
    index = buffer.extend(TensorDict({"next": {"value": torch.zeros(3)}}, [3]))
    buffer.update_if_present(
        index=index, generation=buffer.writer.generations_of(index), patch={"next": {"value": torch.ones(3)}}
    )
    assert buffer["next", "value"].tolist() == [1, 1, 1]


def test_newer_versions_win():
    buffer = tracking()
    buffer.extend(frames(8).set("version", torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])))
    handle = {"index": torch.arange(8), "generation": torch.zeros(8, dtype=torch.int64)}
    patch = {"value": torch.ones(8, 1)}
    result = buffer.update_if_present(**handle, patch=patch, version_key="version", version=4)
    assert result.updated.tolist() == [True] * 5 + [False] * 3
    assert result.version_rejected.tolist() == [False] * 5 + [True] * 3
    assert (result.stale_count, result.version_rejected_count) == (0, 3)
    assert buffer[:]["version"].tolist() == [4, 4, 4, 4, 4, 5, 6, 7]
    newer = buffer.update_if_present(**handle, patch=patch, version_key="version", version=4, require_newer=True)
    assert newer.updated_count == 0
    twice = buffer.update_if_present(
        index=torch.tensor([0, 0, 0]),
        generation=torch.zeros(3, dtype=torch.int64),
        patch={"value": torch.tensor([[5.0], [6.0], [7.0]])},
        version_key="version",
        version=torch.tensor([8, 9, 9]),
    )
    assert twice.updated.tolist() == [False, False, True]
    assert buffer[0]["value"] == 7.0
    assert buffer[0]["version"] == 9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"patch": {"other": torch.ones(2)}}, KeyError, "patch: expected entries among.*got 'other'"),
        ({"patch": {"value": torch.ones(2)}}, ValueError, r"'value' of shape \[2, 1\].*got \[2\]"),
        ({"patch": {"value": torch.ones(2, 1).double()}}, ValueError, "float32.*got.*float64"),
        ({"patch": {}}, ValueError, "at least one entry"),
        ({"generation": [0]}, ValueError, "generation: expected one for each of the 2 elements, got 1"),
        ({"version_key": "version"}, ValueError, "expected both or neither"),
        ({"version_key": "other", "version": 1}, KeyError, "version_key: there is no entry 'other'"),
        ({"version_key": "version", "version": [1, 2, 3]}, ValueError, "version: expected one number"),
        ({"version_key": "value", "version": 1}, ValueError, "without version_key 'value'"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, error, message):
    buffer = tracking()
    buffer.extend(frames(4))
    before = buffer[:].clone()
    given = {"index": [0, 1], "generation": [0, 0], "patch": {"value": torch.ones(2, 1)}, **change}
    with pytest.raises(error, match=message):
        buffer.update_if_present(**given)
    assert bool((buffer[:] == before).all())


def test_storages_without_entries_are_named():
    buffer = tracking(storage=ListStorage)
    buffer.extend(frames(4))
    with pytest.raises(TypeError, match=r"ListStorage.*LazyTensorStorage"):
        buffer.update_if_present(index=[0], generation=[0], patch={"value": torch.ones(1, 1)})


def test_priorities_of_what_was_overwritten_stay():
    def filled() -> TensorDictPrioritizedReplayBuffer:
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=1.0,
            beta=1.0,
            eps=1e-12,
            storage=LazyTensorStorage(4),
            batch_size=64,
            writer=RoundRobinWriter(track_generations=True),
        )
        buffer.extend(frames(4))
        return buffer

    buffer = filled()
    batch = buffer.sample()
    buffer.extend(frames(2, 4))
    buffer.update_tensordict_priority(batch.set("td_error", torch.full((64,), 0.0)))
    assert set(buffer.sample(200)["obs"].tolist()) == {4, 5}  # the new ones keep theirs

    buffer = filled()
    index = torch.arange(4)
    buffer.extend(frames(2, 4))
    buffer.update_priority(index, torch.zeros(4), generation=torch.zeros(4, dtype=torch.int64))
    assert set(buffer.sample(200)["obs"].tolist()) == {4, 5}
    buffer.update_priority(index, torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert 4 not in buffer.sample(200)["obs"].tolist()


def test_prefetched_batches_carry_the_generation_of_their_draw():
    buffer = tracking(4, sampler=None, batch_size=16, prefetch=2)
    buffer.extend(frames(4))
    batch = buffer.sample()
    buffer.extend(frames(4, 4))
    late = buffer.sample()  # drawn before the second write, or after it
    assert batch["index_generation"].tolist() == [0] * 16
    assert torch.equal(late["obs"], late["index"] + 4 * late["index_generation"])
    buffer.shutdown()


def test_slices_see_boundaries_that_were_changed():
    buffer = tracking(30, sampler=SliceSampler(slice_len=10, end_key="end"), batch_size=200)
    buffer.extend(TensorDict({"obs": torch.arange(20), "end": torch.zeros(20, dtype=torch.bool)}, [20]))
    batch = buffer.sample()
    where = batch["obs"] == 4
    buffer.update_if_present(
        index=batch["index"][where],
        generation=batch["index_generation"][where],
        patch={"end": torch.ones(int(where.sum()), dtype=torch.bool)},
    )
    batch = buffer.sample()
    after = batch["obs"][torch.cat([torch.tensor([False]), batch["obs"][:-1] == 4])]
    assert set(after.tolist()) <= {0, 5, 6, 7, 8, 9, 10} | set(range(11, 20))
    assert bool(batch["is_init"].squeeze(-1)[torch.cat([torch.tensor([False]), batch["obs"][:-1] == 4])].all())


def test_a_shared_buffer_tracks_too():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True), shared=True, batch_size=8
    )
    buffer.extend(frames(4))
    batch, info = buffer.sample(return_info=True)
    buffer.extend(frames(1, 4))
    result = buffer.update_if_present(
        index=info["index"], generation=info["index_generation"], patch={"value": torch.ones(8, 1)}
    )
    assert torch.equal(result.updated, batch["obs"] != 0)
