"""Slices lie in one trajectory and in consecutive frames of it, are drawn uniformly, and are marked."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rollwright.data.replay_buffers.storages.storage import ListStorage
from rollwright.data.replay_buffers.storages.tensors import LazyMemmapStorage, LazyTensorStorage

IDS, DONE, TRUNCATED, TERMINATED = (
    ("collector", "traj_ids"),
    ("next", "done"),
    ("next", "truncated"),
    ("next", "terminated"),
)


def trajectory(name, steps, first=0, **entries):
    """``steps`` consecutive frames of a trajectory, its last one done unless told otherwise."""
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[-1] = entries.pop("done", True)
    td = TensorDict({"step": torch.arange(first, first + steps), "name": torch.full((steps,), name)}, [steps])
    td[DONE], td[IDS] = done, torch.full((steps,), name)
    return td.update(entries)


def stored(*lengths, size=10_000, storage=None):
    storage = LazyTensorStorage(size) if storage is None else storage
    for name, steps in enumerate(lengths):
        storage.append(trajectory(name, steps))
    return storage


def draw(sampler, storage, n, seed=None):
    """A draw, and the batch as a buffer makes it."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with storage.ledger.reading():
        drawn = sampler.draw(storage, n, generator)
        batch = storage.read(drawn.index)
    batch = torch.stack(batch) if isinstance(batch, list) else batch
    return drawn, sampler.mark(batch, drawn)


def cuts(drawn):
    """Slices as (first, after last) places in the batch."""
    return [(int(a), int(b) + 1) for a, b in zip(drawn.slices.first, drawn.slices.last, strict=True)]


def check_slices(drawn, batch, length, strict=False):
    """What holds for every batch of slices; returns their lengths."""
    assert drawn.slices.first[0] == 0
    lengths = []
    for start, stop in cuts(drawn):
        part = batch[start:stop]
        assert len(set(part["name"].tolist())) == 1
        assert part["step"].diff().tolist() == [1] * (len(part) - 1)
        assert not part[DONE][:-1].any()
        lengths.append(stop - start)
    assert sum(lengths) == len(batch)
    assert max(lengths) <= length
    assert not strict or set(lengths) == {length}
    assert batch["is_init"].flatten().nonzero().flatten().tolist() == drawn.slices.first.tolist()
    return lengths


def longest(storage):
    """Length of the longest trajectory that is stored, found by looking at every frame."""
    low, high = storage.ledger.live()
    gaps = {p for start, stop in storage.ledger.gaps().tolist() for p in range(start, stop)}
    names, done = storage.entry("name", low, high), storage.entry(DONE, low, high)[..., 0]
    best = 0
    for column in range(storage.columns):
        run = 0
        for i in range(high - low):
            new = i == 0 or names[i, column] != names[i - 1, column] or done[i - 1, column]
            run = 0 if low + i in gaps else 1 if new else run + 1
            best = max(best, run)
    return best


# No boundary is crossed ---------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["rows", "list", "file"]),
    columns=st.sampled_from([1, 1, 3]),
    size=st.integers(4, 60),
    strict=st.booleans(),
    keys=st.sampled_from(["free", "ids", "ends"]),
    listen=st.booleans(),
)
def test_slices_never_cross_a_boundary(seed, kind, columns, size, strict, keys, listen):
    """Random lengths, writes of random sizes with other writers' frames between, wrap-arounds, gaps, empties."""
    rng = np.random.default_rng(seed)
    if kind == "list":
        storage, columns = ListStorage(size), 1
    else:
        make = LazyTensorStorage if kind == "rows" else LazyMemmapStorage
        storage = make(size * columns, ndim=1 if columns == 1 else 2)
    named = {"free": {}, "ids": {"traj_key": IDS}, "ends": {"end_key": DONE}}[keys]
    length = int(rng.integers(1, 9))
    sampler = SliceSampler(slice_len=length, strict_length=strict, **named)
    name, step = np.arange(columns), np.zeros(columns, int)
    for _ in range(30):
        n = int(rng.integers(1, size // 2 + 2))
        written = []
        for _ in range(n):
            done = rng.random(columns) < 0.15
            if keys != "ends" and rng.random() < 0.1:  # cut by another writer, or by nothing that is flagged
                name, step = name + columns + 100_000, np.zeros(columns, int)
            flags = torch.from_numpy(done)[:, None]
            td = TensorDict({"step": torch.from_numpy(step.copy()), "name": torch.from_numpy(name.copy())}, [columns])
            td[DONE], td[IDS] = flags, td["name"].clone()
            written.append(td)
            name, step = np.where(done, name + columns, name), np.where(done, 0, step + 1)
        data = torch.stack(written, -1)
        storage.append(data[0] if columns == 1 else data, dim=0 if columns == 1 else 1)
        if listen:
            sampler.follow(storage)
        if kind != "list" and rng.random() < 0.1:
            storage.ledger.abandon(storage.ledger.reserve(int(rng.integers(1, 4))))
            name, step = name + columns, np.zeros(columns, int)  # frames were lost: another trajectory
            if keys == "ends":
                storage.ledger.clear()  # nothing else says so
        if rng.random() < 0.05:
            storage.ledger.clear()
        if not len(storage) or rng.random() < 0.3:
            continue
        if strict and longest(storage) < length:
            with pytest.raises(ValueError, match="the longest trajectory stored"):
                draw(sampler, storage, length)
            continue
        drawn, batch = draw(sampler, storage, 6 * length, int(rng.integers(1000)))
        check_slices(drawn, batch, length, strict)
        assert set(drawn.index.tolist()) <= set(storage.live_index().tolist())


def test_time_inside_rows():
    """``dim_extend=0`` of a storage ``[N, T]``: each row is a stretch of its own."""
    storage = LazyTensorStorage(40, ndim=2)
    step, name = torch.arange(10).expand(5, 10), torch.zeros(5, 10, dtype=torch.int64)  # one id all over
    data = TensorDict({"step": step, "name": torch.arange(5)[:, None].expand(5, 10)}, [5, 10])
    data[IDS], data[DONE] = name, torch.zeros(5, 10, 1, dtype=torch.bool)
    for i in range(5):
        storage.append(data[i : i + 1], dim=0)
    assert storage.period == 10
    drawn, batch = draw(SliceSampler(slice_len=4), storage, 400, 0)
    check_slices(drawn, batch, 4, strict=True)
    assert set(batch["name"].tolist()) == {1, 2, 3, 4}  # the first row was overwritten


def test_the_seam_of_the_ring_is_no_boundary_and_its_memory_order_none():
    storage = LazyTensorStorage(10)
    storage.append(trajectory(0, 10, done=False))
    storage.append(trajectory(0, 7, first=10, done=False))
    drawn, batch = draw(SliceSampler(slice_len=10, strict_length=True), storage, 20)
    assert batch["step"].tolist() == [*range(7, 17)] * 2
    assert drawn.index[:10].tolist() == [7, 8, 9, 0, 1, 2, 3, 4, 5, 6]


def test_equal_ids_on_both_sides_of_a_done_are_two_trajectories():
    storage = LazyTensorStorage(100)
    storage.append(trajectory(5, 4))
    storage.append(trajectory(5, 4))
    drawn, batch = draw(SliceSampler(slice_len=8), storage, 80)
    assert set(check_slices(drawn, batch, 8)) == {4}
    _, batch = draw(SliceSampler(slice_len=8, traj_key=IDS), storage, 8)  # named, so nothing else counts
    assert len(batch) == 8


def test_frames_without_an_id_are_no_frames():
    storage = LazyTensorStorage(100)
    batch = torch.cat([trajectory(0, 5, done=False), trajectory(-1, 5, done=False), trajectory(2, 5)])
    storage.append(batch)
    for sampler in (SliceSampler(slice_len=3), SliceSampler(slice_len=3, traj_key=IDS)):
        _, batch = draw(sampler, storage, 300)
        assert set(batch["name"].tolist()) == {0, 2}
    lost = LazyTensorStorage(10)
    lost.append(trajectory(-1, 5))
    with pytest.raises(ValueError, match="all frames that are stored have an id below 0"):
        draw(SliceSampler(slice_len=3), lost, 3)


def test_writes_of_other_processes_are_seen_when_drawing():
    """The sampler is not told; more was written than the storage holds."""
    storage = stored(5, size=20)
    sampler = SliceSampler(slice_len=2)
    draw(sampler, storage, 4)
    for name in range(10, 30):
        storage.append(trajectory(name, 7))
    _, batch = draw(sampler, storage, 400)
    assert set(batch["name"].tolist()) == {27, 28, 29}


def test_an_interrupted_look_at_the_storage_is_repeated(monkeypatch):
    storage = stored(6, size=20)
    sampler = SliceSampler(slice_len=10)
    draw(sampler, storage, 10)
    storage.append(trajectory(1, 5))
    with monkeypatch.context() as patch:
        patch.setattr(sampler._boundaries._index, "extend", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sampler.follow(storage)
    drawn, batch = draw(sampler, storage, 400)
    assert set(check_slices(drawn, batch, 10)) == {5, 6}


def test_changes_in_place_are_seen():
    storage = stored(6)
    sampler = SliceSampler(slice_len=6)
    assert len(draw(sampler, storage, 6)[1]) == 6
    changed = trajectory(0, 6)
    changed[IDS] = torch.tensor([0, 0, 1, 1, 2, 2])
    storage.overwrite(np.arange(6), changed)
    assert len(draw(sampler, storage, 6)[1]) == 2


def test_a_pass_leaves_out_trajectories_that_were_cut_in_place():
    storage = stored(6, 6, 6)
    sampler = SliceSamplerWithoutReplacement(slice_len=6, shuffle=False)
    assert draw(sampler, storage, 6)[1]["name"].unique().tolist() == [0]
    storage.overwrite(np.array([8, 9]), trajectory(7, 2))
    drawn, batch = draw(sampler, storage, 6)
    assert batch["name"].tolist() == [2] * 6
    assert check_slices(drawn, batch, 6) == [6]
    assert sampler.ran_out


def test_a_pass_of_another_storage_gives_nothing_that_is_not_stored():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=SliceSamplerWithoutReplacement(slice_len=2), batch_size=2
    )
    for name in range(4):
        buffer.extend(trajectory(name, 5))
    buffer.sample()
    buffer.set_storage(LazyTensorStorage(20))
    buffer.extend(trajectory(9, 5))
    for _ in range(8):
        assert buffer.sample()["name"].tolist() == [9, 9]


# How often -----------------------------------------------------------------------------------------


def test_trajectories_and_starts_are_drawn_uniformly():
    lengths = [1, 3, 5, 8, 20]
    storage = stored(*lengths)
    drawn, batch = draw(SliceSampler(slice_len=5), storage, 5 * 20_000, 0)
    starts = batch[torch.from_numpy(drawn.slices.first)]
    for name, length in enumerate(lengths):
        here = starts["step"][starts["name"] == name]
        assert abs(len(here) - 4000) < 5 * np.sqrt(4000 * 0.8)
        places = max(length - 5, 0) + 1
        counts = torch.bincount(here, minlength=places)
        assert len(counts) == places
        expected = len(here) / places
        assert ((counts - expected).abs() < 5 * expected**0.5).all()


def test_long_enough_trajectories_are_drawn_uniformly():
    storage = stored(4, 5, 6, 50)
    drawn, batch = draw(SliceSampler(slice_len=5, strict_length=True), storage, 5 * 9000, 0)
    check_slices(drawn, batch, 5, strict=True)
    counts = torch.bincount(batch["name"][torch.from_numpy(drawn.slices.first)])
    assert counts[0] == 0
    assert ((counts[1:] - 3000).abs() < 5 * 3000**0.5).all()


def test_draws_repeat_with_the_seed():
    storage = stored(30, 40, 50)
    sampler = SliceSampler(slice_len=8)
    one, two = draw(sampler, storage, 64, 7)[0].index, draw(sampler, storage, 64, 7)[0].index
    np.testing.assert_array_equal(one, two)
    torch.manual_seed(1)
    three = draw(sampler, storage, 64)[0].index
    torch.manual_seed(1)
    np.testing.assert_array_equal(three, draw(pickle.loads(pickle.dumps(sampler)), storage, 64)[0].index)
    assert (one != three).any()


def test_spans_reach_over_the_ends():
    storage = stored(10, 10)
    drawn, batch = draw(SliceSampler(slice_len=4, span=(False, True)), storage, 4 * 3000, 0)
    lengths = np.array(check_slices(drawn, batch, 4))
    steps = batch["step"][torch.from_numpy(drawn.slices.first)]
    assert torch.bincount(steps).min() > 200  # each step is the first of some slice
    assert set(lengths) == {1, 2, 3, 4}
    _, batch = draw(SliceSampler(slice_len=4, span=(2, False)), storage, 4 * 3000, 0)
    assert len(batch) < 4 * 3000
    drawn, batch = draw(SliceSampler(slice_len=4, span=(2, 0), strict_length=True), storage, 4 * 3000, 0)
    assert set(check_slices(drawn, batch, 4)) == {2, 3, 4}
    with pytest.raises(ValueError, match=r"span: expected .* less steps than a slice has \(4\)"):
        SliceSampler(slice_len=4, span=4)


# What the batch says ------------------------------------------------------------------------------


def test_first_steps_are_marked_beside_the_stored_marks():
    storage = LazyTensorStorage(100)
    init = torch.zeros(6, dtype=torch.bool)
    init[[0, 3]] = True  # a reset inside what counts as one trajectory
    storage.append(trajectory(0, 6, is_init=init))
    _, batch = draw(SliceSampler(slice_len=6), storage, 12)
    assert batch["is_init"].tolist() == [True, False, False, True, False, False] * 2
    assert storage.read(np.arange(6))["is_init"].tolist() == init.tolist()
    _, batch = draw(SliceSampler(slice_len=6, init_key=None), storage, 6)
    assert batch["is_init"].tolist() == init.tolist()
    _, batch = draw(SliceSampler(slice_len=2, init_key=("agent", "is_init")), storage, 4)
    assert batch["agent", "is_init"].tolist() == [[True], [False], [True], [False]]


def test_marks_in_a_list_of_tensordicts():
    storage = stored(4, storage=ListStorage(10))
    for (td,) in storage._items.values():
        td["is_init"] = torch.zeros(1, dtype=torch.bool)
    with storage.ledger.reading():
        sampler = SliceSampler(slice_len=2)
        drawn = sampler.draw(storage, 4)
        batch = sampler.mark(TensorDict.lazy_stack(storage.read(drawn.index)), drawn)
    assert batch["is_init"].squeeze(-1).tolist() == [True, False, True, False]
    assert not any(td["is_init"] for (td,) in storage._items.values())


@pytest.mark.parametrize("strict", [True, False])
def test_ends_are_truncated_only_where_nothing_ended(strict):
    storage = LazyTensorStorage(100)
    ended = torch.tensor([False, False, False, True])[:, None]
    storage.append(trajectory(0, 4, next={"done": ended, "terminated": ended, "truncated": ended ^ ended}))
    drawn, batch = draw(SliceSampler(slice_len=2, truncated_key=TRUNCATED, strict_length=strict), storage, 200)
    last = batch[torch.from_numpy(drawn.slices.last)]
    real = last["step"] == 3
    assert 0 < real.sum() < len(last)
    assert torch.equal(last[TERMINATED].squeeze(-1), real)
    assert torch.equal(last[TRUNCATED].squeeze(-1), ~real)
    assert torch.equal(batch[DONE], batch[TERMINATED] | batch[TRUNCATED])
    assert batch[TRUNCATED].sum() == (~real).sum()
    assert not storage.read(np.arange(4))[TRUNCATED].any()


def test_truncation_completes_the_flags_that_are_missing():
    storage = stored(4)  # with done alone
    drawn, batch = draw(SliceSampler(slice_len=3, truncated_key=TRUNCATED), storage, 300)
    last = batch[torch.from_numpy(drawn.slices.last)]
    assert torch.equal(last[TERMINATED], (last["step"] == 3)[:, None])
    assert torch.equal(last[TRUNCATED], ~last[TERMINATED])
    assert torch.equal(batch[DONE], batch[TERMINATED] | batch[TRUNCATED])
    bare = LazyTensorStorage(10)
    bare.append(trajectory(0, 4).select(IDS))
    _, batch = draw(SliceSampler(slice_len=4, truncated_key=TRUNCATED), bare, 4)
    assert batch[TRUNCATED].squeeze(-1).tolist() == batch[DONE].squeeze(-1).tolist() == [False] * 3 + [True]
    assert not batch[TERMINATED].any()


def test_padding_repeats_the_last_step_and_says_so():
    storage = stored(2, 3, 9)
    _, batch = draw(SliceSampler(slice_len=4, pad_output=True, truncated_key=TRUNCATED), storage, 40, 0)
    assert len(batch) == 40
    rows = batch.reshape(10, 4)
    mask = rows["collector", "mask"]
    for row, real in zip(rows, mask, strict=True):
        n = int(real.sum())
        assert real.tolist() == [True] * n + [False] * (4 - n)
        assert n == {0: 2, 1: 3, 2: 4}[int(row["name"][0])]
        steps = row["step"].tolist()
        assert steps == [steps[0] + min(i, n - 1) for i in range(4)]
        assert row["is_init"].flatten().tolist() == [True, False, False, False]
        assert row[DONE][n - 1]
    assert not mask.all()
    _, batch = draw(SliceSampler(slice_len=4, pad_output=True, strict_length=True), storage, 8)
    assert batch["collector", "mask"].all()


# Where boundaries come from -----------------------------------------------------------------------


def test_entries_are_tried_in_order():
    both = trajectory(0, 6)
    both["episode"] = torch.tensor([0, 0, 0, 1, 1, 1])
    for entries, most in (
        (both, 6),
        (both.exclude(IDS), 3),
        (both.exclude(IDS, "episode"), 6),
        (both.exclude(IDS, "episode").clone().set(DONE, (torch.arange(6) == 1)[:, None]), 4),
    ):
        storage = LazyTensorStorage(10)
        storage.append(entries)
        _, batch = draw(SliceSampler(slice_len=6), storage, 60)
        with pytest.raises(ValueError, match=f"slice_len: expected at most {most}, the length of the longest"):
            draw(SliceSampler(slice_len=7, strict_length=True), storage, 7)
        assert len(batch) == 60 if most == 6 else len(batch) < 60


def test_tensors_in_place_of_entries():
    storage = LazyTensorStorage(8)
    storage.append(TensorDict({"name": torch.zeros(8), "step": torch.arange(8)}, [8]))
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    ends = torch.tensor([False, False, True, False, False, False, False, True])
    for tensors in ({"trajectories": ids}, {"ends": ends}):
        sampler = SliceSampler(slice_len=5, **tensors)
        drawn, batch = draw(sampler, storage, 500, 0)
        assert {(batch["step"][a].item(), b - a) for a, b in cuts(drawn)} == {(0, 3), (3, 5)}
    with pytest.raises(ValueError, match=r"ends: expected a value for each of the 8 elements stored, got 5"):
        draw(SliceSampler(slice_len=5, ends=ends[:5]), storage, 5)


@pytest.mark.parametrize("strict", [False, True])
def test_the_collectors_ids_may_be_missing_where_ends_are_stored(strict):
    storage = LazyTensorStorage(100)
    for name, steps in enumerate((3, 5, 9)):
        storage.append(trajectory(name, steps).exclude(IDS))
    drawn, batch = draw(SliceSampler(slice_len=4, traj_key=IDS, strict_length=strict), storage, 400)
    check_slices(drawn, batch, 4, strict)
    assert set(batch["name"].tolist()) == ({1, 2} if strict else {0, 1, 2})


def test_entries_that_are_missing_are_named():
    storage = LazyTensorStorage(8)
    storage.append(TensorDict({"obs": torch.zeros(8)}, [8]))
    sampler = SliceSampler(slice_len=2)
    sampler.follow(storage)  # a write does not fail for it
    with pytest.raises(KeyError, match=r"expected one of the entries .*traj_ids.* but the storage has 'obs'"):
        draw(sampler, storage, 2)
    with pytest.raises(KeyError, match=r"traj_key: there is no entry 'run'; the storage has 'obs'"):
        draw(SliceSampler(slice_len=2, traj_key="run"), storage, 2)
    with pytest.raises(KeyError, match=r"end_key: there is no entry 'end'"):
        draw(SliceSampler(slice_len=2, end_key="end"), storage, 2)
    objects = ListStorage(3)
    objects.append(["a", "b"])
    with pytest.raises(KeyError, match="its elements are no TensorDicts"):
        draw(sampler, objects, 2)


# Shapes of batches --------------------------------------------------------------------------------


def test_number_or_length_or_both():
    storage = stored(50)
    for options in ({"num_slices": 4}, {"slice_len": 8}, {"num_slices": 4, "slice_len": 8}):
        drawn, batch = draw(SliceSampler(**options), storage, 32)
        assert check_slices(drawn, batch, 8) == [8] * 4


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"num_slices": 5}, 32, r"a multiple of num_slices=5, got 32\. Pass batch_size=30"),
        ({"slice_len": 5}, 32, r"a multiple of slice_len=5, got 32\. Pass batch_size=30"),
        ({"slice_len": 50}, 32, "a multiple of slice_len=50, got 32"),
        ({"num_slices": 50}, 32, "a multiple of num_slices=50, got 32"),
        ({"num_slices": 4, "slice_len": 5}, 32, r"expected num_slices=4 \* slice_len=5, got 32\. Pass batch_size=20"),
    ],
)
def test_batch_sizes_that_slices_do_not_fill(options, size, message):
    with pytest.raises(ValueError, match=message):
        draw(SliceSampler(**options), stored(50), size)


def test_options_that_exclude_themselves():
    with pytest.raises(ValueError, match="num_slices, slice_len: expected one of them, got neither"):
        SliceSampler()
    with pytest.raises(ValueError, match="slice_len: expected an integer of at least 1, got 0"):
        SliceSampler(slice_len=0)
    with pytest.raises(ValueError, match="got both"):
        SliceSampler(slice_len=2, traj_key="episode", trajectories=torch.zeros(3))
    with pytest.raises(ValueError, match=r"of shape \[n\], got \[3, 1\]"):
        SliceSampler(slice_len=2, ends=torch.zeros(3, 1))


# Without replacement ------------------------------------------------------------------------------


def test_each_trajectory_once_a_pass():
    storage = stored(3, 9, 4, 7, 2)
    sampler = SliceSamplerWithoutReplacement(slice_len=3)
    for _ in range(3):
        names = []
        while True:
            drawn, batch = draw(sampler, storage, 6)
            check_slices(drawn, batch, 3)
            names += batch["name"][torch.from_numpy(drawn.slices.first)].tolist()
            if sampler.ran_out:
                break
        assert sorted(names) == [0, 1, 2, 3, 4]
    strict = SliceSamplerWithoutReplacement(slice_len=4, strict_length=True, drop_last=True, shuffle=False)
    _, batch = draw(strict, storage, 8)
    assert batch["name"].tolist() == [1] * 4 + [2] * 4
    assert strict.ran_out


def test_a_pass_leaves_out_what_was_overwritten():
    storage = stored(4, 4, 4, size=12)
    sampler = SliceSamplerWithoutReplacement(slice_len=4, shuffle=False, strict_length=True)
    draw(sampler, storage, 4)
    storage.append(trajectory(7, 5))  # over the first, and a frame of the second
    drawn, batch = draw(sampler, storage, 8)
    assert check_slices(drawn, batch, 4) == [4]
    assert batch["name"].tolist() == [2] * 4
    assert sampler.ran_out
    twin = SliceSamplerWithoutReplacement(slice_len=4, shuffle=False, strict_length=True)
    twin.load_state_dict(sampler.state_dict())
    assert twin.ran_out
