"""Numbers of frames per batch: rounded to what can be delivered, with a warning where that differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollwright._warnings import warn_user
from rollwright.collectors.options import CollectorOptions


def announce_rounding(owner: str, rounding: str) -> None:
    """Warn of what differs from what was asked, if anything does."""
    if rounding:
        warn_user(f"{owner} delivers whole batches: {rounding}.", UserWarning)


@dataclass(frozen=True)
class FrameCounts:
    """Counts of a collector.

    Attributes:
        steps: of each environment in a batch.
        frames: in a batch, over all environments.
        batches: in all; None for no end, or where it is not known.
        total: frames in all; infinity for no end.
        random_frames: first frames with random actions.
        rounding: what differs from what was asked, for a warning; empty when nothing does.

    Example:
        >>> counts = FrameCounts.of(CollectorOptions(frames_per_batch=10, total_frames=25), num_envs=4)
        >>> counts.steps, counts.frames, counts.batches, counts.total
        (3, 12, 3, 36)
        >>> counts.rounding
        'frames_per_batch=10 becomes 12, 3 steps of 4 environments; total_frames=25 becomes 36, 3 batches of 12'
    """

    steps: int
    frames: int
    batches: int | None
    total: float
    random_frames: int
    rounding: str

    @classmethod
    def of(cls, options: CollectorOptions, num_envs: int) -> FrameCounts:
        """Round up what the options ask, for a number of environments stepped together."""
        asked = num_envs if options.frames_per_batch is None else options.frames_per_batch
        steps = -(-asked // num_envs)
        frames = steps * num_envs
        batches = None if options.total_frames == -1 else -(-options.total_frames // frames)
        asked_random = max(options.init_random_frames or 0, 0)
        random_frames = -(-asked_random // frames) * frames
        notes = []
        if frames != asked:
            notes.append(f"frames_per_batch={asked} becomes {frames}, {steps} steps of {num_envs} environments")
        if batches is not None and batches * frames != options.total_frames:
            notes.append(
                f"total_frames={options.total_frames} becomes {batches * frames}, {batches} batches of {frames}"
            )
        if random_frames != asked_random:
            notes.append(f"init_random_frames={asked_random} becomes {random_frames}")
        total = math.inf if batches is None else batches * frames
        return cls(steps, frames, batches, total, random_frames, "; ".join(notes))

    @classmethod
    def of_workers(
        cls, asked: Any, total: int, each: Sequence[tuple[int, int]], *, sync: bool, waits: bool
    ) -> FrameCounts:
        """Counts of a collector with workers.

        Args:
            asked: as ``frames_per_batch``; a list for one number each.
            total: frames in all, as asked; -1 for no end.
            each: frames in a batch and with random actions, of each worker.
            sync: whether a batch is of all workers.
            waits: whether it waits for all of them to the end.
        """
        of_each = [frames for frames, _ in each]
        frames = sum(of_each) if sync else max(of_each)
        known = waits if sync else len(set(of_each)) == 1
        batches = None if total == -1 else -(-total // frames)
        rounded = math.inf if batches is None else batches * frames if known else total
        notes = []
        if asked not in (None, frames) and not isinstance(asked, list | tuple):
            notes.append(f"frames_per_batch={asked} becomes {frames}, in {len(each)} workers")
        if total not in (-1, rounded):
            notes.append(f"total_frames={total} becomes {rounded}, {batches} batches of {frames}")
        random_frames = sum(random for _, random in each)
        return cls(0, frames, batches if known else None, rounded, random_frames, "; ".join(notes))
