"""What workers have written to a replay buffer: every frame once, and trajectories that are whole."""

from __future__ import annotations

import multiprocessing

from tests.collectors.workers.envs import DONE, EPISODE, IDENT, IDS, INSTANCE, STEP, tally


def homing(ident):
    """An environment that knows the process of its group; workers that make it need not import a file of tests."""
    env = tally(ident)
    env.parent = multiprocessing.parent_process().pid
    return env


def frames_by_name(buffer):
    """All frames by environment, instance, episode and step; none is there twice."""
    seen = buffer[:]["observation"]
    names = [tuple(row) for row in seen[:, [IDENT, INSTANCE, EPISODE, STEP]].tolist()]
    assert len(set(names)) == len(names)
    return names


def check_trajectories(buffer):
    """Every trajectory is whole, in one piece, under an id of its own; returns how many there are."""
    stored = buffer[:]
    ids, steps, done = stored[IDS], stored["observation"][:, STEP], stored[DONE].squeeze(-1)
    ends = [i for i in range(len(ids)) if done[i]]
    starts = [0, *(i + 1 for i in ends[:-1])]
    assert not len(ids) or ends[-1] == len(ids) - 1
    for start, end in zip(starts, ends, strict=True):
        assert ids[start : end + 1].unique().numel() == 1
        assert steps[start : end + 1].tolist() == list(range(end + 1 - start))
    assert ids.unique().numel() == len(ends)
    return len(ends)
