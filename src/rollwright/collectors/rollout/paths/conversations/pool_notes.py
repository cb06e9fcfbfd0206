"""What a pool of conversations notes of them: which have ended, what has come of them, and its frames, saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright.collectors.rollout.paths.conversations.saving import Names
from rollwright.collectors.rollout.paths.pool import PoolFrame
from rollwright.collectors.rollout.state import td_from, td_state
from rollwright.envs.llm.pooled import Name

__all__ = ["AskedStep", "EndedConversation", "Notes", "loaded_frames", "name_of", "saved_frames", "text_of"]


class EndedConversation(NamedTuple):
    """A conversation that has ended and was not delivered.

    Attributes:
        env_index: of its environment.
        name: of it there.
        text: its name for people.
    """

    env_index: int
    name: Name
    text: str


class AskedStep(NamedTuple):
    """Where an environment was before a step that it was asked for.

    Attributes:
        root: what the step is taken from.
        state: what the environment saved.
        reason: why its conversation begins again; None: it goes on.
    """

    root: TensorDictBase
    state: dict[str, Any]
    reason: str | None


@dataclass
class Notes:
    """What an environment is to know of its conversations, before the next one is drawn, or the place is saved."""

    delivered: list[Name] = field(default_factory=list)
    dropped: list[Name] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.delivered) + len(self.dropped)


def name_of(td: TensorDictBase) -> Name:
    """The name of the conversation of a frame: its group and its repeat."""
    return int(td.get("group_id")), int(td.get("repeat"))


def text_of(td: TensorDictBase) -> str:
    """The same for people."""
    index, epoch, repeat = (int(td.get(key)) for key in ("prompt_index", "epoch", "repeat"))
    return f"prompt {index} (epoch {epoch}, repeat {repeat})"


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
