"""PathParts: what every execution path is constructed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright._memory import MemoryPool
from rollwright.collectors.core import TrajectoryIds
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor
from rollwright.collectors.rollout.paths.conversations.rows import ConversationRows
from rollwright.collectors.rollout.policy import ActingPolicy, Devices, Syncs
from rollwright.collectors.rollout.stats import StageTimer
from rollwright.data.compact import BoundaryKeeper
from rollwright.envs.base import EnvBase


class Taken(NamedTuple):
    """A step that another path has taken, or a part of one.

    Attributes:
        outcome: what the environment returned, as :meth:`EnvBase.step_outcome` does; None: it is recorded already, and
            what was reset after it is left.
        marked: what was reset after it, bool ``[*env]``; None: nothing was, and what ended is to be reset.
        fresh: what that returned, as :meth:`EnvBase.reset_outcome` does.
    """

    outcome: TensorDictBase | None
    marked: torch.Tensor | None = None
    fresh: TensorDictBase | None = None


HandOver = Callable[
    [list[TensorDictBase], TensorDictBase, BoundaryKeeper | None, Mapping[str, str], bool, Taken | None], None
]


@dataclass(frozen=True)
class PathParts:
    """Parts of which every path is constructed.

    Attributes:
        env: the environment.
        acting: the policy.
        options: of the collector.
        devices: of the collector.
        syncs: what to call after copies between them.
        steps: T.
        ids: hands out trajectory ids.
        memory: provides the memory of batches.
        timer: where the stages of a step are noted.
        cursor: keeps account of the conversations of the environment; None: it is another one.
        conversations: its rows on TensorDicts; None: it has none.
        hand_over: leaves the current batch to the plain path: called with the frames so far, the current TensorDict
            after the policy has acted, the keeper of boundaries, reasons by part, whether actions are random, and the
            current step, if it was taken.
    """

    env: EnvBase
    acting: ActingPolicy
    options: CollectorOptions
    devices: Devices
    syncs: Syncs
    steps: int
    ids: TrajectoryIds
    memory: MemoryPool
    timer: StageTimer
    cursor: ConversationCursor | None
    conversations: ConversationRows | None
    hand_over: HandOver

    @property
    def current_device(self) -> torch.device | None:
        """Of what the next step is taken from."""
        return None if self.devices.current_has_no_device else self.env.device

    def version(self) -> int:
        """Of the weights that act."""
        return self.acting.version

    def stamp(self) -> int | str:
        """What turns are stamped with: the version, or a UUID."""
        return self.acting.stamp
