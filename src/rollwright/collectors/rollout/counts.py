"""How many frames will be delivered: what was asked, rounded to what can be, and what to say about it."""

from __future__ import annotations

from dataclasses import dataclass

from rollwright.collectors.options import CollectorOptions

__all__ = ["FrameCounts"]


@dataclass(frozen=True)
class FrameCounts:
    """Counts of a collector.

    Attributes:
        steps: of each environment in a batch.
        frames: in a batch, over all environments.
        batches: in all; None for no end.
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
    random_frames: int
    rounding: str

    @property
    def total(self) -> float:
        """Frames in all; infinity for no end."""
        return float("inf") if self.batches is None else self.batches * self.frames

    @classmethod
    def of(cls, options: CollectorOptions, num_envs: int) -> FrameCounts:
        """Round up what the options ask, for a number of environments stepped together."""
        steps = -(-options.frames_per_batch // num_envs)
        frames = steps * num_envs
        batches = None if options.total_frames == -1 else -(-options.total_frames // frames)
        asked_random = max(options.init_random_frames or 0, 0)
        random_frames = -(-asked_random // frames) * frames
        said = []
        if frames != options.frames_per_batch:
            said.append(
                f"frames_per_batch={options.frames_per_batch} becomes {frames}, "
                f"{steps} steps of {num_envs} environments"
            )
        if batches is not None and batches * frames != options.total_frames:
            said.append(
                f"total_frames={options.total_frames} becomes {batches * frames}, {batches} batches of {frames}"
            )
        if random_frames != asked_random:
            said.append(f"init_random_frames={asked_random} becomes {random_frames}")
        return cls(steps, frames, batches, random_frames, "; ".join(said))
