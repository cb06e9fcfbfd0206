"""What a pool of conversations has to tell its environments, and its frames, saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright.collectors.rollout.paths.conversations.cursor import Names
from rollwright.collectors.rollout.paths.pool import PoolFrame
from rollwright.collectors.rollout.state import td_from, td_state
from rollwright.data.llm.turns import Origin
from rollwright.envs.llm.core import Opening, PromptDraw
from rollwright.envs.llm.pooled import Name


class PoolNotes:
    """Stands for the data of all environments of a pool: each learns later what was delivered of its own.

    The group of a conversation is that of its environment, times the number of environments, plus the index of the
    environment.

    Args:
        count: of environments.
    """

    def __init__(self, count: int) -> None:
        self.source, self._count = self, count
        self.of: list[list[Origin]] = []
        self.clear()

    def clear(self) -> None:
        """Nothing is to be told."""
        self.of = [[] for _ in range(self._count)]

    def delivered(self, origin: Origin) -> None:
        """See :meth:`PromptSource.delivered`."""
        self.of[self.env_of(origin)].append(origin)

    def claim(self, origin: Origin) -> None:
        """See :meth:`PromptSource.claim`: the environments claim what they load."""

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`PromptSource.state_dict`: each environment has its own."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`PromptSource.load_state_dict`."""

    def env_of(self, origin: Origin) -> int:
        """The index of the environment that a conversation is of."""
        return origin.group % self._count

    def name_of(self, origin: Origin) -> Name:
        """The name that its environment has for a conversation."""
        return origin.group // self._count, origin.repeat

    def take(self, index: int) -> list[Name]:
        """What an environment is to be told was delivered; once."""
        found, self.of[index] = self.of[index], []
        return [self.name_of(origin) for origin in found]


def opening_of(td: TensorDictBase) -> Opening:
    """The conversation of a frame of a pool."""
    index, epoch, repeat, group = (int(td.get(key)) for key in ("prompt_index", "epoch", "repeat", "group_id"))
    return Opening(PromptDraw(Origin(index, epoch, repeat, group, 0), {}))


def saved_frames(frames: Iterable[PoolFrame], without: set[int]) -> list[dict[str, Any]]:
    """Frames as ``torch.load(..., weights_only=True)`` reads them, without those of some trajectories."""
    kept = [frame for frame in frames if frame.id not in without]
    return [{"td": td_state(each.td), "id": each.id, "env_index": each.env_index, "ended": each.ended} for each in kept]


def loaded_frames(saved: Iterable[Mapping[str, Any]], names: Names) -> list[PoolFrame]:
    """Frames that were saved, under the ids that their trajectories have now."""
    found = []
    for each in saved:
        td = td_from(each["td"])
        assert td is not None
        number, ended = names.of(each["id"]), each["ended"]
        td.set(("collector", "traj_ids"), torch.tensor(number, device="cpu"))
        found.append(PoolFrame(td, number, each["env_index"], None if ended is None else (ended[0], ended[1])))
    return found
