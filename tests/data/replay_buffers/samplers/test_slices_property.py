"""Slices never cross a boundary, whatever was written, in whatever order, wherever it lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    RaggedStorage,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rollwright.envs import GymEnv, SerialEnv

STORAGES = {
    "tensor": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "list": ListStorage,
    "shared": LazyTensorStorage,
    "ragged": RaggedStorage,
    "ragged-shared": RaggedStorage,
}
SAMPLERS = {
    "uniform": SliceSampler,
    "without": SliceSamplerWithoutReplacement,
    "prioritized": lambda **options: PrioritizedSliceSampler(1000, 0.7, 0.5, **options),
}


class Source:
    """Trajectories of random lengths, cut into batches wherever batches end."""

    def __init__(self, ids: list[int], rng: np.random.Generator, longest: int) -> None:
        self.ids, self.rng, self.longest = ids, rng, longest  # ids: next free one, shared between sources
        self.left = 0

    def frames(self, n: int) -> TensorDict:
        ids, steps, ends = [], [], []
        for _ in range(n):
            if not self.left:
                self.id, self.step = self.ids[0], 0
                self.ids[0] += 1
                self.left = int(self.rng.integers(1, self.longest + 1))
            self.left -= 1
            ids.append(self.id)
            steps.append(self.step)
            ends.append(not self.left)
            self.step += 1
        steps_ = torch.tensor(steps)
        return TensorDict(
            {
                "collector": {"traj_ids": torch.tensor(ids)},
                "step": steps_,
                "is_init": (steps_ == 0).unsqueeze(-1),
                "next": {"step": steps_ + 1, "done": torch.tensor(ends).unsqueeze(-1)},
            },
            [n],
        )


def check_slices(batch: TensorDict, *, slice_len: int, strict: bool, by_ids: bool = True) -> None:
    """Each slice is a stretch of consecutive steps of one trajectory, and its first step is marked."""
    ids, step = batch["collector", "traj_ids"], batch["step"]
    first = batch["is_init"].reshape(-1)
    assert first[0]
    goes_on = ~first[1:]
    assert (ids[1:] == ids[:-1])[goes_on].all()
    assert (step[1:] == step[:-1] + 1)[goes_on].all()
    assert torch.equal(batch["next", "step"][:-1][goes_on], step[1:][goes_on])
    assert not batch["next", "done"].reshape(-1)[:-1][goes_on].any()  # the last frame of a trajectory ends its slice
    lengths = torch.diff(torch.cat([first.nonzero()[:, 0], torch.tensor([len(step)])]))
    assert (lengths <= slice_len).all()
    if strict:
        assert (lengths == slice_len).all()


def longest_run(held: TensorDict) -> int:
    """Frames of the longest stretch of consecutive steps of one trajectory."""
    ids, step = held["collector", "traj_ids"].tolist(), held["step"].tolist()
    longest = length = 1
    for n in range(1, len(ids)):
        length = length + 1 if (ids[n], step[n]) == (ids[n - 1], step[n - 1] + 1) else 1
        longest = max(longest, length)
    return longest


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=9, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(12, 60),
    longest=st.integers(1, 25),
    slice_len=st.integers(1, 8),
    strict=st.booleans(),
    calls=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30)), min_size=1, max_size=8),
)
def test_slices_stay_inside_trajectories(storage, sampler, seed, size, longest, slice_len, strict, calls):
    """Two sources whose batches, of parts of trajectories, are written in any order, over a seam or more."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    buffer = TensorDictReplayBuffer(
        storage=STORAGES[storage](size),
        sampler=SAMPLERS[sampler](slice_len=slice_len, strict_length=strict),
        shared="shared" in storage,
    )
    ids = [0]
    sources = [Source(ids, rng, longest) for _ in range(2)]
    for source, n in calls:
        buffer.extend(sources[source].frames(n))
        held = buffer[:][buffer.storage.ledger.live()[0] % size :]
        held = torch.cat([held, buffer[:][: len(buffer) - len(held)]])  # from the oldest on
        live = set(zip(held["collector", "traj_ids"].tolist(), held["step"].tolist(), strict=True))
        if strict and longest_run(held) < slice_len:
            with pytest.raises(ValueError, match="slice_len"):
                buffer.sample(slice_len * 5)
            continue
        batch = buffer.sample(slice_len * 5)
        check_slices(batch, slice_len=slice_len, strict=strict)
        assert set(zip(batch["collector", "traj_ids"].tolist(), batch["step"].tolist(), strict=True)) <= live


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("key", ["done", "episode"])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(12, 60), calls=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_one_source_is_told_apart_by_other_keys(sampler, key, seed, size, calls):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    buffer = ReplayBuffer(storage=LazyTensorStorage(size), sampler=SAMPLERS[sampler](slice_len=4))
    source = Source([0], rng, 9)
    for n in calls:
        data = source.frames(n)
        data["episode" if key == "episode" else "number"] = data["collector", "traj_ids"].clone()
        buffer.extend(data.exclude(("collector", "traj_ids")))
        batch = buffer.sample(20)
        batch["collector", "traj_ids"] = batch["episode" if key == "episode" else "number"]
        check_slices(batch, slice_len=4, strict=False)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("storage", "dim"), in_turn(["tensor", "memmap", "shared"], [0, 1]))
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    envs=st.integers(1, 3),
    size=st.integers(15, 60),
    strict=st.booleans(),
    calls=st.lists(st.integers(1, 14), min_size=1, max_size=6),
)
def test_slices_in_two_dimensions(storage, sampler, dim, seed, envs, size, strict, calls):
    """Each environment goes on from batch to batch (dim 1), or each row of a batch stands alone (dim 0)."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    buffer = TensorDictReplayBuffer(
        storage=STORAGES[storage](size, ndim=2),
        sampler=SAMPLERS[sampler](slice_len=3, strict_length=strict),
        shared="shared" in storage,
        dim_extend=dim,
    )
    ids = [0]
    sources = [Source(ids, rng, 12) for _ in range(envs)]
    for n in calls:
        buffer.extend(torch.stack([source.frames(n if dim else 5) for source in sources]))
        ring = buffer.storage.state_dict()["elements"]  # from the oldest row on
        rows = ring.reshape(-1, envs) if dim else ring
        held = rows.transpose(0, 1).reshape(-1) if dim else rows
        live = set(zip(held["collector", "traj_ids"].tolist(), held["step"].tolist(), strict=True))
        if strict and longest_run(held) < 3:
            with pytest.raises(ValueError, match="slice_len"):
                buffer.sample(30)
            continue
        batch = buffer.sample(30)
        check_slices(batch, slice_len=3, strict=strict)
        assert set(zip(batch["collector", "traj_ids"].tolist(), batch["step"].tolist(), strict=True)) <= live
        where = buffer.storage.flat(batch["index"])
        again = buffer.storage.read(where)
        assert torch.equal(again["step"], batch["step"])


def test_every_start_of_a_slice_is_drawn():
    """Where trajectories of 3, 5 and 9 frames are stored, in a ring that has wrapped around."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(17), sampler=SliceSampler(slice_len=3, strict_length=True)
    )
    lengths = torch.tensor([6, 3, 5, 9])
    ids = torch.arange(4).repeat_interleave(lengths)
    step = torch.cat([torch.arange(length) for length in lengths.tolist()])
    for part in TensorDict({"collector": {"traj_ids": ids}, "step": step}, [23]).split(4):
        buffer.extend(part)
    torch.manual_seed(0)
    batch = buffer.sample(3 * 3000)
    first = batch["is_init"].reshape(-1)
    starts = list(zip(batch["collector", "traj_ids"][first].tolist(), batch["step"][first].tolist(), strict=True))
    expected = {(1, 0), *((2, step) for step in range(3)), *((3, step) for step in range(7))}
    assert set(starts) == expected
    share = torch.tensor([starts.count((1, 0)) / 3000, starts.count((2, 1)) / 1000 / 3, starts.count((3, 4)) / 3000])
    assert torch.allclose(share, torch.tensor([1 / 3, 1 / 9, 1 / 21]), atol=0.04)  # a trajectory, then a place in it


# Prioritised: places where slices begin are found when frames are written, not again when the start of a trajectory is
# overwritten; a sampler that is made anew (after load_state_dict, too) draws there, this one does not.


@pytest.mark.parametrize("sampler", ["uniform", "without", "prioritized"])
def test_what_is_left_of_a_trajectory_is_drawn_too(sampler):
    """Of a trajectory whose first frames were overwritten, leaving fewer than a slice has."""
    torch.manual_seed(0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SAMPLERS[sampler](slice_len=4))
    ids = torch.tensor([0] * 5 + [1] * 8)
    frames = TensorDict({"collector": {"traj_ids": ids}, "step": torch.arange(13)}, [13])
    for frame in frames.split(1):
        buffer.extend(frame)
        buffer.sample(4)
    drawn = [buffer.sample(8) for _ in range(20)]
    assert {step for batch in drawn for step in batch["step"][batch["collector", "traj_ids"] == 0].tolist()} == {3, 4}


# A real environment ------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("way", "envs"), in_turn(["extend", "into_buffer", "flattened"], [1, 2]))
def test_the_next_observation_is_the_observation_of_the_next_frame(way, envs, sampler):
    """Batches of CartPole that end in the middle of trajectories, over a ring that wraps around."""
    torch.manual_seed(0)
    make_env = (lambda: GymEnv("CartPole-v1")) if envs == 1 else (lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")))
    ndim = envs if way != "flattened" else 1
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(150 * envs, ndim=ndim), sampler=SAMPLERS[sampler](slice_len=8), batch_size=320
    )
    options = {"replay_buffer": buffer} if way == "into_buffer" else {}
    with Collector(make_env, None, frames_per_batch=33 * envs, total_frames=330 * envs, **options) as collector:
        for batch in collector:
            if way == "extend":
                buffer.extend(batch)
            elif way == "flattened":
                buffer.extend(batch.reshape(-1))
            batch = buffer.sample()
            first = batch["is_init"].reshape(-1)
            goes_on = ~first[1:]
            assert first[0]
            assert torch.equal(batch["next", "observation"][:-1][goes_on], batch["observation"][1:][goes_on])
            ids = batch["collector", "traj_ids"].reshape(-1)
            assert (ids[1:] == ids[:-1])[goes_on].all()
            assert not batch["next", "done"].reshape(-1)[:-1][goes_on].any()
            assert goes_on.float().mean() > 0.5
    assert buffer.write_count == 330 * envs
