"""ReplayBufferEnsemble: several buffers, sampled as one, each written by its own source."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SliceSampler,
    TensorDictReplayBuffer,
)


def of_member(member: int, n: int = 4) -> TensorDict:
    return TensorDict({"member": torch.full((n,), member), "serial": torch.arange(n) + 100 * member}, [n])


def members(count: int = 3, kind: type = TensorDictReplayBuffer, **options) -> list[ReplayBuffer]:
    return [kind(storage=LazyTensorStorage(20), **options) for _ in range(count)]


def filled(count: int = 3, kind: type = TensorDictReplayBuffer, **options) -> ReplayBufferEnsemble:
    ensemble = ReplayBufferEnsemble(*members(count, kind), **{"batch_size": 6, **options})
    for n in range(count):
        ensemble.extend(of_member(n, 4 + n), member=n)
    return ensemble


def test_one_row_of_each_member():
    ensemble = filled(sample_from_all=True)
    batch, info = ensemble.sample(return_info=True)
    assert batch["member"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["index", "buffer_ids"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert torch.equal(batch["index", "index"] + 100 * batch["member"], batch["serial"])
    assert torch.equal(info["index"]["index"], batch["index", "index"])
    assert ensemble.sample(9).batch_size == (3, 3)
    assert len(ensemble) == 3
    assert ensemble.write_count == 4 + 5 + 6


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_batches_of_tensordicts_say_where_elements_lie_whatever_buffers_the_members_are(storage):
    ensemble = ReplayBufferEnsemble(*[ReplayBuffer(storage=storage(20)) for _ in range(2)], batch_size=6)
    for n in range(2):
        ensemble.extend(of_member(n), member=n)
    batch = ensemble.sample()
    assert torch.equal(batch["index", "buffer_ids"], batch["member"])
    assert torch.equal(batch["index", "index"] + 100 * batch["member"], batch["serial"])


def test_a_transform_of_a_member_may_leave_elements_out():
    few = [
        kind(storage=LazyTensorStorage(20), transform=lambda batch: batch[:2])
        for kind in (ReplayBuffer, TensorDictReplayBuffer)
    ]
    for buffer in few:
        buffer.extend(of_member(0))
    plain, with_index = (ReplayBufferEnsemble(buffer, batch_size=4).sample() for buffer in few)
    assert plain["serial"].shape == with_index["serial"].shape == (1, 2)
    assert "index" not in plain
    assert torch.equal(with_index["index", "index"], with_index["serial"])


def test_elements_with_time_in_them_have_one_index_each():
    ensemble = ReplayBufferEnsemble(TensorDictReplayBuffer(storage=LazyTensorStorage(20)), batch_size=3)
    ensemble.extend(TensorDict({"serial": torch.arange(12).reshape(4, 3)}, [4, 3]), member=0)
    batch = ensemble.sample()
    assert batch["index", "index"].shape == batch.shape == (1, 3, 3)
    assert torch.equal(batch["index", "index"] * 3 + torch.arange(3), batch["serial"])


@pytest.mark.parametrize("index", [slice(1, 3), [1, 2], torch.tensor([1, 2]), np.array([False, True, True])])
@pytest.mark.parametrize("options", [{"p": [1.0, 0.0, 3.0]}, {"sample_from_all": True}, {}])
def test_some_members_are_an_ensemble(index, options):
    ensemble = filled(transform=lambda batch: batch.set("seen", torch.ones(batch.shape)), **options)
    some = ensemble[index]
    assert some.members == ensemble.members[1:]
    batch = some.next()
    assert batch.shape == ((2, 3) if "sample_from_all" in options else (3, 2))
    assert set(batch["member"].reshape(-1).tolist()) <= ({2} if "p" in options else {1, 2})
    assert (batch["seen"] == 1).all()
    assert len(ensemble) == 3


def test_members_are_drawn_by_their_weights():
    generator = torch.Generator().manual_seed(0)
    ensemble = filled(p=[1.0, 0.0, 3.0], num_buffer_sampled=1600, batch_size=1600, generator=generator)
    counts = ensemble.sample()["member"].reshape(-1).bincount(minlength=3)
    assert counts[1] == 0
    assert abs(int(counts[2]) - 1200) < 5 * 18
    ensemble = filled(num_buffer_sampled=1500, batch_size=1500, generator=generator)
    assert ((ensemble.sample()["member"].reshape(-1).bincount(minlength=3) - 500).abs() < 5 * 19).all()


def test_the_number_of_rows_may_differ_from_that_of_members():
    ensemble = filled(num_buffer_sampled=2, batch_size=10)
    batch, info = ensemble.sample(return_info=True)
    assert batch.batch_size == (2, 5)
    assert batch["member"][:, 0].tolist() == info["members"]


@pytest.mark.parametrize("how", ["argument", "set_rng"])
def test_one_generator_seeds_members_and_their_choice(how):
    runs = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        ensemble = filled(num_buffer_sampled=3, generator=generator if how == "argument" else None)
        if how == "set_rng":
            ensemble.set_rng(generator)
        runs.append([ensemble.sample()["serial"].tolist() for _ in range(5)])
    assert runs[0] == runs[1]


def test_samplers_collation_and_transforms_of_members_are_their_own():
    first = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=SamplerWithoutReplacement(shuffle=False))
    second = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9), transform=lambda batch: batch.set("member", batch["member"] + 10)
    )
    ensemble = ReplayBufferEnsemble(
        first,
        second,
        sample_from_all=True,
        batch_size=8,
        transform=lambda batch: batch.set("seen", batch["serial"] > 0),
    )
    ensemble.append_transform(lambda batch: batch.set("member", batch["member"] * 2))
    for n in range(2):
        ensemble.extend(of_member(n), member=n)
    batch = ensemble.sample()
    assert batch["serial"][0].tolist() == [0, 1, 2, 3]
    assert batch["member"].tolist() == [[0] * 4, [22] * 4]
    assert torch.equal(batch["seen"], batch["serial"] > 0)


def test_collate_fn_gets_the_rows():
    ensemble = filled(sample_from_all=True, collate_fn=lambda rows: torch.cat([row["member"] for row in rows]))
    assert ensemble.sample().tolist() == [0, 0, 1, 1, 2, 2]


def test_tensors_are_stacked_too():
    ensemble = ReplayBufferEnsemble(*members(2, ReplayBuffer), sample_from_all=True, batch_size=4)
    for n in range(2):
        ensemble.extend(torch.full((3,), n), member=n)
    assert ensemble.sample().tolist() == [[0, 0], [1, 1]]


def test_rows_of_slices_cut_short_are_stacked_as_they_are():
    buffers = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4, traj_key="serial"))
        for _ in range(2)
    ]
    ensemble = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=8)
    for n, buffer in enumerate(buffers):
        data = of_member(n, 6)
        data["serial"] = torch.arange(6) // (2 + 2 * n)  # trajectories of two and of four frames
        buffer.extend(data)
    batch = ensemble.sample()
    assert len(batch) == 2
    assert batch[0].batch_size == (2,)
    assert batch[1].batch_size in {(4,), (2,)}


# Writing -----------------------------------------------------------------------------------------


def test_a_key_routes_elements_to_their_members():
    ensemble = ReplayBufferEnsemble(*members(), sample_from_all=True, batch_size=6, routing_key="member")
    data = torch.cat([of_member(n, 2 + n) for n in range(3)])
    shuffled = data[torch.randperm(len(data))]
    index = ensemble.extend(shuffled)
    assert index.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3]
    for n, buffer in enumerate(ensemble.members):
        assert sorted(buffer[:]["serial"].tolist()) == of_member(n, 2 + n)["serial"].tolist()
    ensemble.extend(of_member(1))
    assert [len(buffer) for buffer in ensemble.members] == [2, 7, 4]
    with pytest.raises(ValueError, match=r"'member'.*members 0 to 2"):
        ensemble.extend(of_member(3))
    with pytest.raises(KeyError, match=r"routing_key.*'member'"):
        ensemble.extend(TensorDict({"serial": torch.arange(2)}, [2]))


def test_members_are_named_by_integers():
    """Half a member is none: nothing is dropped."""
    ensemble = ReplayBufferEnsemble(*members(), sample_from_all=True, batch_size=6, routing_key="member")
    with pytest.raises(TypeError, match=r"'member': expected integers, numbers of members, got torch.float32"):
        ensemble.extend(TensorDict({"member": torch.tensor([0.0, 0.5])}, [2]))
    assert ensemble.write_count == 0


def test_one_element_is_routed():
    ensemble = ReplayBufferEnsemble(*members(), sample_from_all=True, batch_size=6, routing_key="member")
    assert [ensemble.add(of_member(n, 1)[0]) for n in (1, 2, 1)] == [0, 0, 1]
    assert [len(buffer) for buffer in ensemble.members] == [0, 2, 1]


def test_a_list_of_elements_is_routed_and_other_objects_are_refused():
    ensemble = ReplayBufferEnsemble(*members(), sample_from_all=True, batch_size=6, routing_key="member")
    assert ensemble.extend(list(torch.cat([of_member(0, 2), of_member(2, 1)]).unbind(0))).tolist() == [0, 1, 0]
    assert [len(buffer) for buffer in ensemble.members] == [2, 0, 1]
    with pytest.raises(TypeError, match=r"routing_key: expected a TensorDict.*'member', got dict"):
        ensemble.extend({"member": torch.zeros(2)})


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_dimension_routes_parts_to_their_members(ndim):
    buffers = [TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=ndim)) for _ in range(3)]
    ensemble = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=6, routing_dim=0)
    data = torch.stack([of_member(n, 4) for n in range(3)])
    ensemble.extend(data if ndim == 1 else data.reshape(3, 2, 2))
    assert [buffer[:]["member"].unique().tolist() for buffer in buffers] == [[0], [1], [2]]
    with pytest.raises(ValueError, match="expected 3 parts along routing_dim=0, got 2"):
        ensemble.extend(data[:2])


def test_one_element_goes_to_the_member_that_is_named():
    ensemble = filled()
    assert ensemble.add(of_member(1)[0], member=1) == 5
    assert len(ensemble.members[1]) == 6


def test_nothing_says_where_to():
    with pytest.raises(ValueError, match=r"member.*routing_key"):
        filled().extend(of_member(0))
    for member in (3, -4):
        with pytest.raises((IndexError, ValueError), match=f"member: expected 0 to 2, got {member}"):
            filled().extend(of_member(0), member=member)


# Elements, priorities, state ---------------------------------------------------------------------


def test_members_and_their_elements_by_index():
    ensemble = filled()
    assert ensemble[1] is ensemble.members[1]
    assert ensemble[1:].members == ensemble.members[1:]
    assert ensemble[:] is ensemble
    assert ensemble[[0, 2], 3]["serial"].tolist() == [3, 203]
    assert ensemble[1, :3]["serial"].tolist() == [100, 101, 102]
    assert ensemble[:, 3]["serial"].tolist() == [3, 103, 203]
    assert ensemble[2, -1]["serial"] == 205


def test_priorities_reach_the_members():
    buffers = members(2, sampler=lambda: PrioritizedSampler(20, 1.0, 1.0))
    ensemble = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=80)
    for n in range(2):
        ensemble.extend(of_member(n), member=n)
    batch = ensemble.sample()
    priority = ((batch["serial"] == 2) | (batch["serial"] == 101)).float()
    ensemble.update_priority(batch["index"], priority)
    again = ensemble.sample()
    assert again["serial"][0].unique().tolist() == [2]
    assert again["serial"][1].unique().tolist() == [101]
    assert again["priority_weight"].shape == (2, 40)


@pytest.mark.parametrize("listed", [False, True])
def test_priorities_of_rows_of_different_lengths_reach_the_members(listed):
    """Slices that are cut short make such rows."""
    buffers = members(2, sampler=lambda: PrioritizedSliceSampler(20, 1.0, 1.0, slice_len=4, traj_key="episode"))
    ensemble = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=8)
    for n in range(2):
        data = of_member(n, 6)
        ensemble.extend(data.set("episode", torch.arange(6) // (2 + n)), member=n)  # of two and of three frames
    batch, info = ensemble.sample(return_info=True)
    while len({len(row) for row in batch.unbind(0)}) == 1:
        batch, info = ensemble.sample(return_info=True)
    ensemble.update_priority(info["index"], 0.0)
    rows = [torch.full((len(row),), 1e9) for row in batch.unbind(0)]
    ensemble.update_priority(info["index"], rows if listed else torch.cat(rows))
    for row, member in zip(info["index"].unbind(0), buffers, strict=True):
        best = torch.from_numpy(member.sampler._priorities.leaves)[:6] == 1e9
        assert best.nonzero().flatten().tolist() == sorted(set(row["index"].tolist()))
    with pytest.raises(ValueError, match=r"priority: expected one for each of the \d elements, got shape \[11\]"):
        ensemble.update_priority(info["index"], torch.ones(11))


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_another_ensemble_goes_on(how, tmp_path):
    ensemble, other = (
        filled(count, num_buffer_sampled=4, batch_size=8, generator=torch.Generator().manual_seed(3))
        for count in (3, 3)
    )
    ensemble.extend(of_member(2), member=2)
    ensemble.sample()
    if how == "dumps":
        ensemble.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(ensemble.state_dict())
    assert [len(buffer) for buffer in other.members] == [4, 5, 10]
    for _ in range(3):
        assert bool((ensemble.sample() == other.sample()).all())
    with pytest.raises(KeyError, match="expected 2 members"):
        filled(2).load_state_dict(ensemble.state_dict())


def test_a_dump_of_other_members_is_refused_and_changes_nothing(tmp_path):
    filled(3).dumps(tmp_path)
    (tmp_path / "members.pt").unlink()  # as older versions wrote it
    for count in (2, 4):
        other = filled(count, batch_size=12)
        with pytest.raises(ValueError, match=f"path: expected a dump of {count} members, got one of 3"):
            other.loads(tmp_path)
        assert [len(buffer) for buffer in other.members] == [4, 5, 6, 7][:count]
    filled(2).dumps(tmp_path)  # over that of three
    with pytest.raises(ValueError, match="expected a dump of 3 members, got one of 2"):
        filled(3).loads(tmp_path)
    filled(2).loads(tmp_path)


def test_counts_of_all_members():
    ensemble = filled(2)
    assert ensemble.stats() == {
        "size": 9,
        "write_count": 9,
        "capacity": 40,
        "prefetch_queue_size": 0,
        "utilization": 9 / 40,
        "initialized": True,
        "num_buffers": 2,
    }


def test_whether_there_is_something_to_sample():
    ensemble = ReplayBufferEnsemble(*members(2), batch_size=4, p=[1.0, 0.0])
    assert not ensemble.can_sample()
    ensemble.extend(of_member(1), member=1)
    assert not ensemble.can_sample()  # of the other member
    ensemble.extend(of_member(0), member=0)
    assert ensemble.can_sample()


def test_transforms_are_applied_in_their_order():
    ensemble = filled(2)
    ensemble.append_transform(lambda batch: batch.set("sum", batch["serial"] + batch["one"]))
    ensemble.insert_transform(0, lambda batch: batch.set("one", torch.ones_like(batch["serial"])))
    batch = ensemble.sample()
    assert torch.equal(batch["sum"], batch["serial"] + 1)
    assert len(ensemble.transform) == 2
    with pytest.raises(IndexError, match="index: expected one from -2 to 2, got 3"):
        ensemble.insert_transform(3, lambda batch: batch)


def test_threads_of_members_end_with_the_ensemble():
    before = set(threading.enumerate())
    ensemble = ReplayBufferEnsemble(*members(2, prefetch=1, batch_size=3), batch_size=6)
    for n in range(2):
        ensemble.extend(of_member(n), member=n)
    ensemble.sample()
    assert set(threading.enumerate()) - before
    ensemble.shutdown()
    assert not set(threading.enumerate()) - before


def test_emptied():
    ensemble = filled()
    ensemble.empty()
    assert [len(buffer) for buffer in ensemble.members] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="empty"):
        ensemble.sample()


def test_members_may_lie_anywhere():
    buffers = [TensorDictReplayBuffer(storage=storage(20)) for storage in (LazyTensorStorage, LazyMemmapStorage)]
    ensemble = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=4, shared=True)
    assert all(buffer.storage.shared for buffer in buffers)
    for n in range(2):
        ensemble.extend(of_member(n), member=n)
    assert ensemble.sample()["member"].tolist() == [[0, 0], [1, 1]]


def test_iteration_goes_on():
    batches = iter(filled(sample_from_all=True))
    assert next(batches).batch_size == next(batches).batch_size == (3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_from_all": True, "p": [1, 1]}, "sample_from_all"),
        ({"sample_from_all": True, "num_buffer_sampled": 1}, "sample_from_all"),
        ({"p": [1.0]}, "p: expected 2 weights"),
        ({"p": [1.0, -1.0]}, "p: expected 2 weights"),
        ({"p": [0.0, 0.0]}, "p: expected 2 weights"),
        ({"p": [1.0, float("nan")]}, "p: expected 2 weights"),
        ({"batch_size": 3}, "batch_size: expected a multiple of 2"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_buffer_sampled": 0}, "num_buffer_sampled"),
        ({"routing_key": "a", "routing_dim": 0}, "routing_key and routing_dim"),
        ({"collate_fn": 3}, "collate_fn"),
        ({"transform": 3}, "transform"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ReplayBufferEnsemble(*members(2), **options)


def test_members_are_buffers():
    with pytest.raises(TypeError, match="buffers: expected replay buffers"):
        ReplayBufferEnsemble()
    with pytest.raises(TypeError, match=r"buffers.*LazyTensorStorage"):
        ReplayBufferEnsemble(LazyTensorStorage(3))
    with pytest.raises(ValueError, match="batch_size"):
        ReplayBufferEnsemble(*members(2)).sample()


@pytest.mark.parametrize("priority", [0.0, torch.tensor(0.0), torch.tensor([[0.0]])])
def test_one_priority_for_all(priority):
    buffers = members(2, sampler=lambda: PrioritizedSampler(20, 1.0, 1.0))
    ensemble = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=80)
    for n in range(2):
        ensemble.extend(of_member(n), member=n)
    index = ensemble.sample()["index"][:, :1]
    ensemble.update_priority(index, priority)
    places = index["index"][:, 0].tolist()
    again = ensemble.sample()["index", "index"]
    assert all(place not in row.tolist() for place, row in zip(places, again, strict=True))


def test_a_member_that_is_filled_while_another_is_empty_does_not_run_ahead_of_the_limiter():
    limiter = SampleToInsertRatio(2.0, margin=40, min_size=8)
    ensemble = ReplayBufferEnsemble(*members(2), batch_size=8, limiter=limiter)
    for _ in range(20):  # the collector of the other member is slow to begin
        assert limiter.may_insert(10)
        ensemble.extend(of_member(0, 10), member=0)
        assert limiter.balance <= limiter.margin
    for _ in range(2):  # it was asked before both of these
        ensemble.extend(of_member(1, 5), member=1)
    assert 0 <= limiter.balance <= limiter.margin + 2 * 10
    assert not limiter.may_insert(10)
    while not limiter.may_insert(10):
        assert len(ensemble.sample()) == 2
    assert -limiter.margin <= limiter.balance <= limiter.margin - 2 * 10
