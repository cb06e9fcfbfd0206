"""Trajectory boundaries: the keys that mark where trajectories begin and end, and what is read from them.

Frames lie one after another, time last: ``[*env, T]`` as a collector delivers them, ``[N]`` in a replay buffer and in
what is sampled from it. Nothing about trajectories is in the shape; it is in these entries, all of one value a frame:

======================================  ==============================================================
``("next", "terminated")``              bool: the task ended here, the value of the next state is zero
``("next", "truncated")``               bool: something else cut it here (a time limit): bootstrap
``("next", "done")``                    bool: ``terminated | truncated``, the last step of a trajectory
``"is_init"``                           bool: the first step of a trajectory, or of a slice of one
``("collector", "traj_ids")``           int64 name of the trajectory; -1 on frames that were not taken
``("collector", "mask")``               bool, in padded or interrupted batches: which are real
``"_reset"``                            asks an environment for a reset; never leaves a collector
======================================  ==============================================================

Ids decide where there are any: neighbours of one id are one trajectory, unless the second is marked ``is_init``.
Without ids a trajectory ends where ``done`` is set. A row of a batch ends every run in it, but no trajectory: that may
go on in the next batch, under its id.

Environments with several agents may hold the flags below the root, one *group* for each place. When the root holds a
group, that group decides for the whole environment.
"""

from rollwright.data.layout.boundaries import (
    DONE,
    IS_INIT,
    MASK,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    RESET,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    DoneGroup,
    Runs,
    Trajectories,
    complete_done,
    deciding_groups,
    done_groups,
    end_of_trajectory,
    last_steps,
    mark_truncated,
    trajectories,
    trajectory_runs,
)
from rollwright.data.layout.splitting import (
    NestedTrajectories,
    blank_frame,
    is_dense,
    join_trajectories,
    pad_trajectories,
    split_trajectories,
    stack_frames,
)

__all__ = [
    "DONE",
    "DoneGroup",
    "IS_INIT",
    "MASK",
    "NEXT_DONE",
    "NEXT_TERMINATED",
    "NEXT_TRUNCATED",
    "NestedTrajectories",
    "RESET",
    "Runs",
    "TERMINATED",
    "TRAJ_IDS",
    "TRUNCATED",
    "Trajectories",
    "blank_frame",
    "complete_done",
    "deciding_groups",
    "done_groups",
    "end_of_trajectory",
    "is_dense",
    "join_trajectories",
    "last_steps",
    "mark_truncated",
    "pad_trajectories",
    "split_trajectories",
    "stack_frames",
    "trajectories",
    "trajectory_runs",
]
