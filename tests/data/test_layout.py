"""Boundaries: how flags complete one another, where trajectories end, how batches are cut and split."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from rollwright.collectors.utils import split_trajectories
from rollwright.data.layout import complete_done, done_groups, end_of_trajectory, mark_truncated

FLAGS = ("done", "terminated", "truncated")
T, F = True, False


def flags(**values):
    return TensorDict({name: torch.tensor([value]) for name, value in values.items()})


# What is given, and what follows: done = terminated | truncated.
COMPLETED = [
    ({"done": T}, (T, T, F)),
    ({"done": F}, (F, F, F)),
    ({"terminated": T}, (T, T, F)),
    ({"terminated": F}, (F, F, F)),
    ({"truncated": T}, (T, F, T)),
    ({"truncated": F}, (F, F, F)),
    ({"terminated": F, "truncated": T}, (T, F, T)),
    ({"terminated": T, "truncated": T}, (T, T, T)),
    ({"done": T, "truncated": T}, (T, F, T)),
    ({"done": T, "truncated": F}, (T, T, F)),
    ({"done": T, "terminated": F}, (T, F, T)),
    ({"done": T, "terminated": T}, (T, T, F)),
    ({"done": F, "terminated": F}, (F, F, F)),
]


@pytest.mark.parametrize(("given_flags", "expected"), COMPLETED)
def test_flags_are_completed_from_one_another(given_flags, expected):
    td = flags(**given_flags)
    complete_done(td, done_groups(FLAGS))
    assert tuple(td[name].item() for name in FLAGS) == expected


@pytest.mark.parametrize(("given_flags", "expected"), [case for case in COMPLETED if "truncated" not in case[0]])
def test_without_a_truncated_flag_none_is_made(given_flags, expected):
    td = flags(**given_flags)
    complete_done(td, done_groups(["done", "terminated"]))
    assert "truncated" not in td
    assert td["done"].item() == expected[0]


@pytest.mark.parametrize("values", list(itertools.product([T, F], repeat=3)))
def test_what_the_environment_said_is_never_changed(values):
    td = flags(**dict(zip(FLAGS, values, strict=True)))
    complete_done(td, done_groups(FLAGS))
    assert tuple(td[name].item() for name in FLAGS) == values


def test_completed_flags_share_no_memory():
    td = flags(done=T)
    complete_done(td, done_groups(FLAGS))
    td["terminated"].fill_(F)
    assert td["done"].item()


def test_a_group_of_which_nothing_is_there_stays_absent():
    td = TensorDict({"x": torch.zeros(1)})
    complete_done(td, done_groups(FLAGS))
    assert list(td.keys()) == ["x"]


def test_every_place_is_completed_by_itself():
    td = TensorDict({"a": {"done": torch.tensor([T])}, "b": {"truncated": torch.tensor([T])}})
    complete_done(td, done_groups([("a", "done"), ("b", "truncated"), ("b", "done"), ("a", "truncated")]))
    assert td["a", "terminated"].item()
    assert not td["b", "terminated"].item()
    assert td["b", "done"].item()


def test_groups_are_in_order_of_place():
    groups = done_groups([("b", "done"), ("a", "c", "done"), "done", ("a", "done"), "truncated"])
    assert [group.prefix for group in groups] == [(), ("a",), ("b",), ("a", "c")]
    assert groups[0].truncated == "truncated"
    assert groups[1].truncated is None
    assert groups[3].reset == ("a", "c", "_reset")


# Ends.


def test_any_flag_of_an_environment_ends_it():
    td = TensorDict({"agents": {"done": torch.tensor([[[T], [F]], [[F], [F]]])}}, [2])
    assert end_of_trajectory(td, done_groups([("agents", "done")]), 1).tolist() == [T, F]


def test_the_roots_flag_decides_where_there_is_one():
    td = TensorDict({"done": torch.tensor([[F], [T]]), "agents": {"done": torch.tensor([[[T]], [[F]]])}}, [2])
    assert end_of_trajectory(td, done_groups(["done", ("agents", "done")]), 1).tolist() == [F, T]


def test_environments_without_flags_never_end():
    assert end_of_trajectory(TensorDict({}, [3]), [], 1).tolist() == [F, F, F]


# Cuts.


@pytest.mark.parametrize("terminated", [T, F])
@pytest.mark.parametrize("truncated", [T, F])
def test_a_cut_truncates_what_has_not_ended_and_never_touches_terminated(terminated, truncated):
    td = flags(done=terminated or truncated, terminated=terminated, truncated=truncated)
    cut = mark_truncated(done_groups(FLAGS), td, 0)
    assert td["done"].item()
    assert td["terminated"].item() is terminated
    assert td["truncated"].item() is (truncated or not terminated)
    assert bool(cut) is not (terminated or truncated)


def test_a_cut_of_a_batch_reaches_each_row_by_itself():
    td = TensorDict({name: torch.tensor([[F], [name != "truncated"], [F]]) for name in FLAGS}, [3])
    assert mark_truncated(done_groups(FLAGS), td, 1).tolist() == [T, F, T]
    assert td["truncated"].flatten().tolist() == [T, F, T]
    assert td["terminated"].flatten().tolist() == [F, T, F]


def test_a_cut_needs_a_truncated_flag():
    with pytest.raises(RuntimeError, match="add_truncated_keys"):
        mark_truncated(done_groups(["done", "terminated"]), flags(done=F, terminated=F), 0)


# Splits.


def batch_of(ids, **extra):
    ids = torch.tensor(ids)
    steps = torch.arange(ids.numel()).reshape(ids.shape)
    return TensorDict({"step": steps, "collector": {"traj_ids": ids}, **extra}, ids.shape)


def test_padded():
    split = split_trajectories(batch_of([[0, 0, 0, 2], [1, 3, 3, 3]]))
    assert split["step"].tolist() == [[0, 1, 2], [3, 0, 0], [4, 0, 0], [5, 6, 7]]
    assert split["collector", "mask"].tolist() == [[T, T, T], [T, F, F], [T, F, F], [T, T, T]]
    assert split.names[-1] == "time"
    assert split.shape == (4, 3)
    assert split["collector"].shape == (4, 3)


def test_nested():
    batch = batch_of([[0, 0, 0, 2], [1, 3, 3, 3]])
    nested = split_trajectories(batch, as_nested=True)
    assert isinstance(nested, LazyStackedTensorDict)
    assert [row["step"].tolist() for row in nested.unbind(0)] == [[0, 1, 2], [3], [4], [5, 6, 7]]
    assert "mask" not in nested[0]["collector"]


def test_nested_rows_are_views():
    batch = batch_of([0, 0, 1])
    split_trajectories(batch, as_nested=True)[0]["step"].fill_(9)
    assert batch["step"].tolist() == [9, 9, 2]


def test_padding_does_not_touch_the_batch():
    batch = batch_of([0, 0, 1])
    split_trajectories(batch)["step"].fill_(9)
    assert batch["step"].tolist() == [0, 1, 2]
    assert ("collector", "mask") not in batch.keys(True)


def test_without_ids_flags_are_read():
    done = torch.tensor([[F], [T], [F], [F], [T]])
    batch = TensorDict({"step": torch.arange(5), "next": {"done": done}}, [5])
    split = split_trajectories(batch)
    assert split["step"].tolist() == [[0, 1, 0], [2, 3, 4]]
    assert split["mask"].tolist() == [[T, T, F], [T, T, T]]


def test_done_key_and_trajectory_key():
    batch = TensorDict(
        {"step": torch.arange(4), "episode": torch.tensor([7, 7, 7, 8]), "ended": torch.tensor([[T], [F], [T], [F]])},
        [4],
    )
    assert split_trajectories(batch, trajectory_key="episode")["step"].tolist() == [[0, 1, 2], [3, 0, 0]]
    assert split_trajectories(batch, done_key="ended")["step"].tolist() == [[0, 0], [1, 2], [3, 0]]


@pytest.mark.parametrize("done_key", ["done", ("next", "done"), ("agents", "done"), ("next", "agents", "done")])
def test_done_key_is_that_of_the_outcome_with_or_without_next(done_key):
    done = torch.tensor([[F], [T], [F], [F], [T]])
    flags = {"done": done, "agents": {"done": done}}
    roots = {"done": torch.zeros_like(done), "agents": {"done": torch.zeros_like(done)}}
    batch = TensorDict({"step": torch.arange(5), **roots, "next": flags}, [5])
    assert split_trajectories(batch, done_key=done_key)["step"].tolist() == [[0, 1, 0], [2, 3, 4]]


def test_prefix_says_where_ids_and_mask_are():
    batch = TensorDict({"step": torch.arange(3), "mine": {"traj_ids": torch.tensor([0, 0, 1])}}, [3])
    split = split_trajectories(batch, prefix="mine")
    assert split["mine", "mask"].tolist() == [[T, T], [T, F]]


def test_frames_that_were_not_taken_are_left_out():
    split = split_trajectories(batch_of([[0, 0, -1], [1, 2, -1]]))
    assert split["step"].tolist() == [[0, 1], [3, 0], [4, 0]]
    assert split["collector", "mask"].sum().item() == 4


def test_rows_of_one_batch_dimension_more():
    split = split_trajectories(batch_of([[[0, 0], [1, 2]], [[3, 3], [4, 4]]]))
    assert split["step"].tolist() == [[0, 1], [2, 0], [3, 0], [4, 5], [6, 7]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_padding_is_zero_in_every_dtype(dtype):
    batch = batch_of([0, 0, 1]).set("value", torch.ones(3, 2, dtype=dtype))
    value = split_trajectories(batch)["value"]
    assert value.dtype == dtype
    assert value.tolist() == [[[1, 1], [1, 1]], [[1, 1], [0, 0]]]


def test_padding_of_values_that_are_not_finite():
    """Zeros, not NaN times zero."""
    batch = batch_of([0, 0, 1]).set("value", torch.tensor([1.0, torch.nan, torch.inf]))
    assert split_trajectories(batch)["value"][1].tolist() == [torch.inf, 0.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_nothing_is_lost_doubled_or_mixed(rows, as_nested):
    """Rows of trajectories of any lengths, cut to one length: each frame comes back once, with its own."""
    steps = min(map(sum, rows))
    fresh = itertools.count()
    ids = [list(itertools.chain.from_iterable([next(fresh)] * n for n in row))[:steps] for row in rows]
    batch = batch_of(ids)
    split = split_trajectories(batch, as_nested=as_nested)
    if as_nested:
        parts = list(split.unbind(0))
    else:
        mask = split["collector", "mask"]
        assert mask.any(-1).all()
        assert mask.sum(-1).max() == mask.shape[-1]
        parts = [row[row["collector", "mask"]] for row in split.unbind(0)]
    assert torch.cat([part["step"] for part in parts]).tolist() == list(range(len(rows) * steps))
    assert all(len(part["collector", "traj_ids"].unique()) == 1 for part in parts)
    assert len(parts) == len({one for row in ids for one in row})


@pytest.mark.parametrize("with_extra", [[0, 1], [2, 3]])
def test_entries_that_some_frames_lack_are_named(with_extra):
    frames = list(batch_of([[0, 0, 1, 1]])[0].unbind(0))
    frames = [
        frame.clone().update({"extra": torch.ones(2)} if t in with_extra else {}) for t, frame in enumerate(frames)
    ]
    batch = LazyStackedTensorDict.lazy_stack(frames, 0)
    with pytest.raises(ValueError, match=r"'extra' is not in every frame.*as_nested=True"):
        split_trajectories(batch)
    assert [row["step"].tolist() for row in split_trajectories(batch, as_nested=True).unbind(0)] == [[0, 1], [2, 3]]
