"""The types of what ``stats()`` of a collector returns, key by key."""

from __future__ import annotations

from typing import Any, TypedDict


class StatsOfWorker(TypedDict):
    """One worker in ``stats()["workers"]`` of a collector.

    Attributes:
        index: its place, from 0.
        alive: whether its process runs.
        pid: of its process; None where there is none on this machine.
        state: what it does: ``"starting"``, ``"waiting"``, ``"stepping"``, ``"paused"``, ``"ended"`` and others.
        frames: that it has collected.
        batches: rollouts that it has finished.
        episodes: that have ended.
        seconds: by stage, as in :class:`CollectorStats`.
        policy_version: version of the weights that it acts with.
        restarts: how often its process was replaced.
        env_recreations: environments that were recreated after a failure.
        threads: of torch in its process; None before it has started.
        error: what ended it; None: nothing.
        waiting_for: what it waits for; None: it works.
    """

    index: int
    alive: bool
    pid: int | None
    state: str
    frames: int
    batches: int
    episodes: int
    seconds: dict[str, float]
    policy_version: int
    restarts: int
    env_recreations: int
    threads: int | None
    error: str | None
    waiting_for: str | None


class Leases(TypedDict):
    """Batches in shared memory that you hold, in ``stats()["leases"]``.

    Attributes:
        held: batches that you hold now.
        most: that you can hold before further ones are copied (``max_batches_held``).
        batches_copied: batches that were copied for that reason.
        message: says so while it is the case; None: it is not.
    """

    held: int
    most: int
    batches_copied: int
    message: str | None


class _StatsOfAll(TypedDict):
    """What every collector reports."""

    frames: int
    total_frames: int | None
    batches: int
    total_batches: int | None
    completed: bool
    frames_per_batch: int
    requested_frames_per_batch: int
    frames_per_second: float | None
    seconds: dict[str, float]
    episodes: int
    mean_return: float | None
    mean_length: float | None
    last_return: float | None
    policy_version: int
    env_recreations: int
    paths: dict[str, str]
    bytes_held: int
    waiting_for: str | None


class CollectorStats(_StatsOfAll, total=False):
    """What ``stats()`` of a collector returns. ``json.dumps`` takes it.

    The last group of keys is there where its condition holds.

    Attributes:
        frames: that were delivered; with workers in step, of all of them together.
        total_frames: to collect in all; None: there is no end.
        batches: that were delivered.
        total_batches: to deliver in all; None: there is no end, or it is not known.
        completed: whether everything was collected.
        frames_per_batch: of a batch.
        requested_frames_per_batch: what you asked for, before it was rounded.
        frames_per_second: while batches are collected; None before the first one.
        seconds: spent in each stage: ``"env"``, ``"policy"``, ``"write"``, and ``"total"``. Workers add
            ``"weights"`` (loading them) and ``"wait"`` (for your loop), and are summed up.
        episodes: that have ended; they count at the end of the batch in which they end.
        mean_return: of the 100 episodes that ended last; None before the first one.
        mean_length: of the same episodes, in frames.
        last_return: of the last of them.
        policy_version: number of weight updates so far.
        env_recreations: environments that ``on_env_failure="recreate"`` has recreated.
        paths: what runs the environment and the policy, how a buffer is written, and why.
        bytes_held: memory of batches, in bytes.
        waiting_for: what the collector waits for; None: nothing.

        devices: one process: the device of each part; None: it was not set.
        trajectories_held: with ``trajs_per_batch``, and with workers: complete trajectories, not delivered yet.
        frames_held: with ``trajs_per_batch``, one process: frames of these, and of those in progress.
        frames_dropped: with ``trajs_per_batch``, one process: frames of trajectories that a reset has cut.
        groups_held: with ``groups_per_batch``: complete groups, not delivered yet.
        write_count: with a replay buffer: elements written so far; None: the buffer does not count.
        buffer: with a replay buffer of this package: its ``stats()``, with ``"size"``, ``"capacity"`` and
            ``"utilization"`` (from 0 to 1).
        limiter: with a buffer that has a limiter, one process: ``"inserted"``, ``"sampled"``, ``"balance"``,
            ``"margin"``, ``"waiting"``.
        background: after ``start()``: whether the thread is ``"running"`` or ``"paused"``, and the ``"error"`` that
            ended it.
        policy_version_acting: after ``start()``, one process: version of the weights that the thread acts with.
        workers: with workers: one entry for each. Their number with ``workers="aggregate"`` or ``"both"``.
        workers_alive: with workers: how many run.
        restarts: with workers: processes that were replaced.
        policy_lag: with workers: the published version less the oldest that a worker acts with.
        frames_stale: with workers: frames that were thrown away (``max_policy_lag``).
        threads: with workers: threads of torch in each, under ``"workers"``.
        leases: with workers: batches in shared memory that you hold.
        forced: with workers: those that had to be terminated at the end.
        messages: with workers: messages to and from them.
        undelivered: with workers: rollouts that wait for your loop.
        turns_ahead: conversations: turns that were generated ahead of their delivery.
        environments_busy: a pool of environments: those that are stepping.
        tokens_discarded: conversations: tokens that were sampled in vain.
        conversations_in_progress: conversations that have begun and not ended.
        conversations_dropped: conversations that were dropped.
        conversations_failed: conversations that have failed, by class of what was raised.
        conversations_undelivered: conversations that have ended, not delivered yet.
        conversations_unfinished: names of conversations that are to be delivered still.
        groups_filtered: groups that a filter left out, by reason.
    """

    devices: dict[str, str | None]
    trajectories_held: int
    frames_held: int
    frames_dropped: int
    groups_held: int
    write_count: int | None
    buffer: dict[str, Any]
    limiter: dict[str, Any]
    background: dict[str, Any]
    policy_version_acting: int
    workers: list[StatsOfWorker]
    workers_alive: int
    restarts: int
    policy_lag: int
    frames_stale: int
    threads: dict[str, list[int | None]]
    leases: Leases
    forced: list[str]
    messages: int
    undelivered: int
    turns_ahead: int
    environments_busy: int
    tokens_discarded: int
    conversations_in_progress: int
    conversations_dropped: int
    conversations_failed: dict[str, int]
    conversations_undelivered: int
    conversations_unfinished: list[str]
    groups_filtered: dict[str, int]
