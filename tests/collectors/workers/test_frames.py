"""What the other tests of this folder look with: it sees holes, splices and doubles."""

from __future__ import annotations

import pytest
import torch
from tests.collectors.workers.envs import EPISODE, IDENT, IDS, INSTANCE, tallies, tally
from tests.collectors.workers.frames import check, flat

from rollwright.collectors import Collector


@pytest.fixture
def frames():
    with Collector(tally, frames_per_batch=50, total_frames=100) as collector:
        return flat(collector).clone()


def test_sound_frames_pass(frames):
    found = check(frames)
    assert (found.frames, found.gaps) == (100, 0)
    assert found.trajectories == len(frames[IDS].unique())
    with Collector(tallies, frames_per_batch=60, total_frames=300) as collector:
        assert len(check(list(collector)).instances) == 3


def without(frames, row):
    return torch.cat([frames[:row], frames[row + 1 :]])


def inside(frames):
    """A row in the middle of a trajectory."""
    ids = frames[IDS]
    return next(row for row in range(20, 80) if ids[row - 1] == ids[row] == ids[row + 1])


def test_a_missing_frame_is_seen(frames):
    with pytest.raises(AssertionError, match="hole"):
        check(without(frames, inside(frames)), gaps=True)


def test_a_missing_end_is_a_gap(frames):
    end = int(frames["next", "done"].reshape(-1).nonzero()[2])
    with pytest.raises(AssertionError, match="between episodes"):
        check(without(frames, end))
    assert check(without(frames, end), gaps=True).gaps == 1
    with pytest.raises(AssertionError, match="no end"):
        check(without(frames, end), gaps=True, whole=True)


def test_a_missing_trajectory_is_a_gap(frames):
    kept = frames[frames[IDS] != frames[50][IDS]]
    assert check(kept, gaps=True).gaps == 1
    with pytest.raises(AssertionError, match="between episodes"):
        check(kept)


def test_a_frame_that_comes_twice_is_seen(frames):
    row = inside(frames)
    with pytest.raises(AssertionError, match="hole"):
        check(torch.cat([frames[: row + 1], frames[row:]]))


@pytest.mark.parametrize("part", [IDENT, INSTANCE, EPISODE])
def test_a_splice_is_seen(frames, part):
    frames["observation"][inside(frames), part] += 1
    with pytest.raises(AssertionError, match="spliced"):
        check(frames)


def test_two_trajectories_under_one_id_are_seen(frames):
    first, second = frames[IDS].unique()[3:5].tolist()
    frames[IDS][frames[IDS] == second] = first
    with pytest.raises(AssertionError):
        check(frames)


def test_torn_rows_are_seen(frames):
    row = inside(frames)
    frames["next", "observation"][row] = 0.0
    with pytest.raises(AssertionError):
        check(frames)
    frames["next", "observation"][row] = frames["observation"][row + 1]
    check(frames)
    frames["next", "reward"][row] = 0.0
    with pytest.raises(AssertionError):
        check(frames)
