"""Orders: the rollouts that workers were asked for, and their memory."""

from __future__ import annotations

import itertools

from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.memory.blocks import BlockLayout
from rollwright.collectors.workers.memory.store import Block, BlockStore
from rollwright.data.replay_buffers import SampleToInsertRatio


class Orders:
    """Asks workers for rollouts.

    Args:
        group: the workers.
        store: memory of batches.
        total_frames: to collect in all; infinity for no end.

    Attributes:
        frames: collected so far, as far as they have arrived.
        held: how many keep rollouts from beginning.
        limiter: of the replay buffer: asked before rollouts begin.
        restarting: workers that reset their environments before the next rollout, because one before it is lost.
        over: workers whose data is over.
        num_messages: sent and received.
        waiting_for: what the next rollout waits for.
    """

    def __init__(self, group: WorkerGroup, store: BlockStore, total_frames: float) -> None:
        self.group, self.store, self.total_frames = group, store, total_frames
        self.frames = self.held = self.num_messages = 0
        self.limiter: SampleToInsertRatio | None = None
        self.restarting: set[int] = set()
        self.over: set[int] = set()
        self.waiting_for: str | None = None
        self._runs = itertools.count()

    @property
    def on_hold(self) -> bool:
        """Whether no rollout may begin."""
        return bool(self.held or self.group.num_pauses)

    def ask(self, worker: Member, block: Block | None) -> None:
        """Ask for a rollout, to lie in a block; None: the worker asks for one."""
        self.group.order(worker, next(self._runs), block, reset=worker.index in self.restarting)
        self.restarting.discard(worker.index)
        self.num_messages += 1

    def may_begin(self, frames: int) -> bool:
        """Whether the replay buffer may take so many more frames."""
        if self.limiter is None or self.limiter.may_insert(frames):
            return True
        self.waiting_for = self.limiter.wants(frames)
        return False

    @staticmethod
    def frames_of(worker: Member) -> int:
        """In a rollout of a worker."""
        return worker.ready.frames_per_batch if worker.ready is not None else 0

    @property
    def num_in_progress(self) -> int:
        """Rollouts that were asked for and have not arrived."""
        return sum(len(worker.runs) for worker in self.group.workers)

    @property
    def frames_asked(self) -> int:
        """Collected, or asked for."""
        return self.frames + sum(len(worker.runs) * self.frames_of(worker) for worker in self.group.workers)

    @property
    def is_short(self) -> bool:
        """Whether a worker is gone for good."""
        return any(worker.error is not None for worker in self.group.workers)

    def grant(self, worker: Member, need: say.Need, layout: BlockLayout, block: Block, part: int) -> say.Grant:
        """Let the current rollout lie in a part of a block."""
        old = worker.runs.get(need.run)
        if old is not None:
            old.runs.discard(need.run)
        worker.runs[need.run] = block
        block.runs.add(need.run)
        return say.Grant(need.run, layout, block.number, block.offset, part)

    def grant_alone(self, worker: Member, need: say.Need) -> say.Grant:
        """Let the current rollout lie in a block of its own."""
        layout = BlockLayout(need.form, (need.form.steps,), "alone")
        return self.grant(worker, need, layout, self.store.take(layout), 0)
