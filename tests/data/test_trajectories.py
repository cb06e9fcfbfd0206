"""Runs of frames: where trajectories lie in the flat layout, views of them, and the way back from rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from rollwright.collectors import Collector
from rollwright.data.layout import (
    Trajectories,
    join_trajectories,
    last_steps,
    split_trajectories,
    trajectories,
    trajectory_runs,
)
from rollwright.envs import GymEnv, TransformedEnv
from rollwright.envs.transforms import InitTracker

T, F = True, False


def batch_of(ids, **extra):
    ids = torch.tensor(ids)
    steps = torch.arange(ids.numel()).reshape(ids.shape)
    return TensorDict({"step": steps, "collector": {"traj_ids": ids}, **extra}, ids.shape)


def spans(batch, **keys):
    return list(zip(*(column.tolist() for column in trajectory_runs(batch, **keys)), strict=True))


def flat(batch):
    """The flat form, copied frame by frame."""
    return torch.cat([row.clone() for row in batch.reshape(-1, batch.shape[-1]).unbind(0)])


def pointers(td):
    return {key: value.data_ptr() for key, value in td.items(True, True)}


@pytest.fixture(scope="module")
def collected():
    """Two batches of three environments, with and without ids, in which episodes end and go on."""
    torch.manual_seed(0)
    make = lambda: TransformedEnv(GymEnv("CartPole-v1", num_envs=3), InitTracker())  # noqa: E731
    with Collector(make, frames_per_batch=180) as collector:
        collector.set_seed(0)
        return [collector.next(), collector.next()]


# Runs.


def test_runs_end_where_ids_change_and_with_their_row():
    assert spans(batch_of([[0, 0, 0, 2], [2, 3, 3, 3]])) == [(0, 0, 3), (0, 3, 1), (1, 0, 1), (1, 1, 3)]
    assert all(column.dtype == torch.int64 for column in trajectory_runs(batch_of([0, 1])))


def test_rows_of_several_dimensions_are_counted_flat():
    assert spans(batch_of([[[0, 0], [1, 2]], [[3, 3], [4, 4]]])) == [
        (0, 0, 2),
        (1, 0, 1),
        (1, 1, 1),
        (2, 0, 2),
        (3, 0, 2),
    ]


def test_ids_win_over_flags():
    """Where an environment is not reset, every frame after the end is done, and still one trajectory."""
    done = torch.tensor([[F], [T], [T]])
    assert spans(batch_of([5, 5, 5], next=TensorDict({"done": done}, [3]))) == [(0, 0, 3)]


def test_is_init_parts_slices_of_one_trajectory():
    """Two slices of one trajectory, one behind the other, as a sampler of slices may draw them."""
    first = torch.tensor([[T], [F], [T], [F]])
    assert spans(batch_of([5, 5, 5, 5], is_init=first)) == [(0, 0, 2), (0, 2, 2)]
    assert spans(batch_of([5, 5, 5, 5], is_init=first), trajectory_key=("collector", "traj_ids")) == [(0, 0, 4)]


def test_flags_are_read_where_there_are_no_ids():
    batch = TensorDict({"next": {"done": torch.tensor([[F], [T], [F], [F]])}}, [4])
    assert spans(batch) == [(0, 0, 2), (0, 2, 2)]
    assert last_steps(batch).tolist() == [F, T, F, T]


def test_flags_of_agents_are_read_where_the_root_has_none():
    done = torch.tensor([[[F], [F]], [[F], [T]], [[F], [F]]])  # 3 steps of 2 agents
    batch = TensorDict({"next": {"agents": TensorDict({"done": done, "truncated": done}, [3, 2])}}, [3])
    assert spans(batch) == [(0, 0, 2), (0, 2, 1)]


def test_frames_that_were_not_taken_are_in_no_run():
    batch = batch_of([[0, 0, -1], [1, -1, -1]])
    assert spans(batch) == [(0, 0, 2), (1, 0, 1)]
    assert last_steps(batch).tolist() == [[F, T, F], [T, F, F]]


def test_padding_is_in_no_run():
    """Padding has the id 0, which may be that of the row."""
    split = split_trajectories(batch_of([0, 0, 0, 1, 1, 0]))
    assert spans(split) == [(0, 0, 3), (1, 0, 2), (2, 0, 1)]
    assert last_steps(split).tolist() == [[F, F, T], [F, T, F], [T, F, F]]


def test_an_entry_called_mask_may_be_something_else():
    actions = torch.tensor([[T, F], [F, T]])
    assert spans(TensorDict({"mask": actions, "next": {"done": torch.tensor([[F], [F]])}}, [2])) == [(0, 0, 2)]


def test_an_empty_batch_has_no_runs():
    empty = batch_of([[0, 0]])[:, :0]
    assert spans(empty) == []
    assert len(trajectories(empty)) == 0
    assert split_trajectories(empty).shape == (0, 0)


@pytest.mark.parametrize(
    ("batch", "keys", "error", "message"),
    [
        (TensorDict({"x": torch.zeros(2)}, [2]), {}, KeyError, r"neither .*traj_ids.* nor .*done.*track_traj_ids=True"),
        (batch_of([0, 0]), {"trajectory_key": "episode"}, KeyError, r"no entry .*episode.*; it has .*traj_ids"),
        (TensorDict({"next": {"done": torch.tensor([T])}}, []), {}, ValueError, r"time dimension.*batch size \[\]"),
        (split_trajectories(batch_of([0, 0, 1]), as_nested=True), {}, ValueError, r"rows of one length.*\[2, -1\]"),
    ],
)
def test_what_has_no_trajectories(batch, keys, error, message):
    for function in (trajectory_runs, last_steps, trajectories, split_trajectories):
        with pytest.raises(error, match=message):
            function(batch, **keys)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4), st.sampled_from("idn"))
def test_runs_are_those_of_a_loop(rows, marked_by):
    """By ids, by done flags, or by the first steps of slices of one trajectory."""
    steps = min(map(sum, rows))
    runs, ids = [], torch.zeros(len(rows), steps, dtype=torch.int64)
    fresh = itertools.count()
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            stop = min(start + length, steps)
            if stop > start:
                ids[row, start:stop] = next(fresh)
                runs.append((row, start, stop - start))
            start += length
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    done = torch.zeros_like(first)
    done[:, :-1] = first[:, 1:]
    batch = {
        "i": TensorDict({"collector": {"traj_ids": ids}}, ids.shape),
        "d": TensorDict({"next": {"done": done.unsqueeze(-1)}}, ids.shape),
        "n": TensorDict({"collector": {"traj_ids": ids * 0}, "is_init": first.unsqueeze(-1)}, ids.shape),
    }[marked_by]
    assert spans(batch) == runs


# Views.


@pytest.mark.parametrize("ids", [T, F])
def test_views_lie_in_the_batch(collected, ids):
    batch = collected[1].clone()
    batch = batch if ids else batch.exclude("collector", "is_init")
    views = trajectories(batch)
    assert len(views) > batch.shape[0]
    for view, (row, start, length) in zip(views, spans(batch), strict=True):
        assert view.shape == (length,)
        assert view.names == ["time"]
        assert pointers(view) == pointers(batch[row, start : start + length])
        view["observation"].fill_(row + start / 100)
        assert not view["next", "done"][:-1].any()
    assert batch["observation"][1, 0].tolist() == [1.0] * 4
    row, start, _ = spans(batch)[-1]
    assert batch["observation"][row, -1, 0].item() == pytest.approx(row + start / 100)


def test_views_of_memory_whose_rows_are_not_contiguous():
    """A batch laid out time first, as ``torch.stack`` of frames leaves it."""
    batch = torch.stack([batch_of([0, 1]) for _ in range(3)]).transpose(0, 1)
    assert not batch["step"].is_contiguous()
    trajectories(batch)[1]["step"].fill_(9)
    split_trajectories(batch, as_nested=True)[0]["step"].fill_(8)
    assert batch["step"].tolist() == [[8, 8, 8], [9, 9, 9]]


def test_views_of_rows_of_several_dimensions():
    batch = batch_of(torch.arange(12).reshape(2, 3, 2).tolist())
    assert [view["step"].tolist() for view in trajectories(batch)] == [[t] for t in range(12)]


def test_views_are_a_sequence():
    views = trajectories(batch_of([0, 0, 1, 2, 2, 2]))
    assert views.lengths.tolist() == [2, 1, 3]
    assert views[-1]["step"].tolist() == [3, 4, 5]
    assert [view["step"].tolist() for view in views[::-2]] == [[3, 4, 5], [0, 1]]
    assert isinstance(views[1:], Trajectories)
    assert views[1:].lengths.tolist() == [1, 3]
    assert repr(views[1:]) == "Trajectories(2 of 4 frames)"
    assert len(list(views)) == len(views) == 3
    with pytest.raises(IndexError):
        views[3]


def test_sums_by_trajectory(collected):
    """Returns, without padding, from views."""
    batch = collected[0]
    for view in trajectories(batch):
        assert view["next", "reward"].sum() == len(view)
    assert sum(map(len, trajectories(batch))) == batch.numel()


# The way back.


@pytest.mark.parametrize("as_nested", [T, F])
@pytest.mark.parametrize("ids", [T, F])
def test_round_trip_is_exact(collected, as_nested, ids):
    for batch in collected:
        batch = batch if ids else batch.exclude("collector")
        joined = join_trajectories(split_trajectories(batch, as_nested=as_nested))
        expected = flat(batch)
        assert set(joined.keys(True, True)) == set(expected.keys(True, True))
        assert all(joined[key].dtype == value.dtype for key, value in expected.items(True, True))
        assert (joined == expected).all()
        assert joined.names == ["time"]
        assert joined.batch_size == expected.batch_size
        if ids:
            continued = split_trajectories(joined, as_nested=as_nested)
            assert len(continued) == len(split_trajectories(batch))


@pytest.mark.parametrize("as_nested", [T, F])
def test_round_trip_of_words_and_single_rows(as_nested):
    batch = batch_of([0, 0, 0])
    batch["word"] = ["a", "b", "c"]
    joined = join_trajectories(split_trajectories(batch, as_nested=as_nested))
    assert joined["word"] == ["a", "b", "c"]
    assert joined["step"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("as_nested", [T, F])
def test_rows_that_all_have_one_length(as_nested):
    split = split_trajectories(batch_of([[0, 0], [1, 1]]), as_nested=as_nested)
    assert join_trajectories(split)["step"].tolist() == [0, 1, 2, 3]


def test_views_and_lists_of_trajectories_are_joined():
    batch = batch_of([[0, 0, 1], [2, 3, 3]])
    views = trajectories(batch)
    assert join_trajectories(views[::2])["step"].tolist() == [0, 1, 3]
    assert join_trajectories([views[3], views[0]])["step"].tolist() == [4, 5, 0, 1]


def test_joined_frames_have_memory_of_their_own():
    batch = batch_of([0, 0, 1])
    for split in (split_trajectories(batch, as_nested=True), split_trajectories(batch), [batch]):
        join_trajectories(split)["step"].fill_(9)
    assert batch["step"].tolist() == [0, 1, 2]


def test_the_mask_may_have_another_name():
    padded = TensorDict({"step": torch.arange(4).reshape(2, 2), "valid": torch.tensor([[T, F], [T, T]])}, [2, 2])
    joined = join_trajectories(padded, mask_key="valid")
    assert joined["step"].tolist() == [0, 2, 3]
    assert list(joined.keys()) == ["step"]


def test_a_nest_made_for_the_mask_leaves_with_it():
    batch = TensorDict({"step": torch.arange(3), "next": {"done": torch.tensor([[F], [T], [F]])}}, [3])
    joined = join_trajectories(split_trajectories(batch, prefix="collector"))
    assert sorted(joined.keys()) == ["next", "step"]


def test_what_cannot_be_joined():
    padded = TensorDict({"step": torch.zeros(2, 3)}, [2, 3])
    with pytest.raises(KeyError, match=r"expected a mask, .*'mask'.* mask_key="):
        join_trajectories(padded)
    with pytest.raises(KeyError, match=r"expected a mask, 'valid'"):
        join_trajectories(padded, mask_key="valid")
    with pytest.raises(ValueError, match=r"bool \[2, 3\], got torch.float32"):
        join_trajectories(padded, mask_key="step")
    with pytest.raises(ValueError, match=r"\[trajectories, T\], got batch size \[3\]"):
        join_trajectories(padded[0])
    with pytest.raises(ValueError, match="at least one trajectory"):
        join_trajectories([])


def test_nested_rows_of_a_padded_batch_have_no_mask():
    again = split_trajectories(split_trajectories(batch_of([0, 0, 1])), as_nested=True)
    assert isinstance(again, LazyStackedTensorDict)
    assert [row["step"].tolist() for row in again.unbind(0)] == [[0, 1], [2]]
    assert ("collector", "mask") not in again[0].keys(True)
