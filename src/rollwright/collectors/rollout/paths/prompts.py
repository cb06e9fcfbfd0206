"""Prompts: which conversations of an environment on TensorDicts have ended, and which of them were delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright.collectors.rollout.paths.dialogs import packed, unpacked
from rollwright.data.layout import TRAJ_IDS, blank_frame
from rollwright.data.llm.records import empty_record
from rollwright.envs.base import EnvBase
from rollwright.envs.llm.core import Opening
from rollwright.envs.llm.env import ConversationEnv

__all__ = ["Prompts", "prompts_of"]


def prompts_of(env: EnvBase, *, delivers_whole: bool) -> Prompts | None:
    """The prompts of an environment of conversations, with or without transforms; None: it is none."""
    return None if _inside(env) is None else Prompts(env, delivers_whole=delivers_whole)


def _inside(env: EnvBase) -> ConversationEnv | None:
    inside: Any = env
    while inside is not None and not isinstance(inside, ConversationEnv):
        inside = vars(inside).get("base_env") or getattr(inside, "_modules", {}).get("base_env")
    return inside if isinstance(inside, ConversationEnv) else None


class Prompts:
    """Follows the conversations of an environment from prompt to delivery.

    The place in the data follows what was delivered: a conversation that ended counts when :meth:`delivered` names it,
    and what nobody will get begins again.

    Args:
        env: an environment of conversations, with or without transforms.
        delivers_whole: whether complete conversations are delivered, and those that ended are held until then.
    """

    def __init__(self, env: EnvBase, *, delivers_whole: bool) -> None:
        self._outer, self._delivers_whole = env, delivers_whole
        self._now: list[Opening | None] = []
        self._ended: dict[int, Opening] = {}  # in the current batch, by trajectory id
        self._undelivered: dict[int, Opening] = {}  # in batches before
        self._last_ended: list[int] = []
        self._dropped = 0

    @property
    def _env(self) -> ConversationEnv:
        env = _inside(self._outer)  # another one where it was recreated
        assert env is not None
        return env

    @property
    def is_over(self) -> bool:
        """Whether there is no conversation left."""
        return self._env.is_over

    # A rollout ----------------------------------------------------------------------------------------

    def before_step(self) -> list[int]:
        """Note which conversations a step is taken in; returns the rows that have none."""
        self._now = self._env.openings
        return [slot for slot, opening in enumerate(self._now) if opening is None]

    def after_step(self, ended: torch.Tensor, ids: torch.Tensor | None) -> None:
        """Note which of them have ended.

        Args:
            ended: bool ``[slots]``.
            ids: of trajectories, int64 ``[slots]``; None: there are none.
        """
        for slot in ended.reshape(-1).nonzero().reshape(-1).tolist():
            opening = self._now[slot]
            if opening is not None:
                number = -1 - len(self._ended) if ids is None else int(ids[slot])
                self._ended[number] = opening

    def begun(self, ended: torch.Tensor) -> torch.Tensor:
        """Where a conversation follows one that has ended, bool ``[slots]``."""
        return ended & torch.tensor([opening is not None for opening in self._env.openings])

    def finish(self, *, renew: bool) -> None:
        """The batch is complete.

        Args:
            renew: end what is in progress, and begin the next conversations.
        """
        self._last_ended = list(self._ended)
        self._undelivered |= self._ended
        self._ended = {}
        if renew:
            self._env.renew()

    # Delivery -----------------------------------------------------------------------------------------

    def delivered(self, ids: Iterable[int] | None) -> None:
        """See :meth:`Path.delivered`."""
        source = self._env.conversations.source
        for number in self._last_ended if ids is None else ids:
            opening = self._undelivered.pop(number, None)
            if opening is not None:
                source.delivered(opening.draw.origin)

    def lost(self, ids: Iterable[int]) -> None:
        """See :meth:`Path.lost`."""
        self._env.begin_again(self._undelivered.pop(number) for number in ids if number in self._undelivered)

    def dropped(self) -> None:
        """See :meth:`Path.dropped`."""
        self._dropped += len(self._undelivered)
        self.delivered(list(self._undelivered))

    def start_over(self) -> None:
        """After an error: what nobody got begins again."""
        lost = dict(self._ended)
        if not self._delivers_whole:  # else those of earlier batches are held, and will be delivered
            lost = self._undelivered | lost
            self._undelivered = {}
        self._ended, self._last_ended = {}, []
        env = self._env
        again = [*lost.values(), *env.interrupted()]
        env.begin_again(again)

    def forget(self) -> None:
        """See :meth:`Path.forget`."""
        self._ended, self._undelivered, self._last_ended = {}, {}, []
        self._env.abandon()

    def row_ids(self, ids: Any) -> Any:
        """Ids of the trajectories that rows go on with; -1 where a row has no conversation, or begins one."""
        return np.where(self._env.in_progress, ids, -1)

    # State --------------------------------------------------------------------------------------------

    def save(self) -> torch.Tensor:
        """Conversations that ended and were not delivered."""
        return packed(self._undelivered)

    def load(self, saved: torch.Tensor | None, held: Iterable[tuple[int, TensorDictBase]]) -> None:
        """Go on from what :meth:`save` saved.

        Args:
            saved: see there.
            held: ids of the trajectories that are held now, and their first frames.
        """
        if saved is None:
            return
        openings = unpacked(saved)
        self._undelivered = renamed(openings, held)
        for opening in self._undelivered.values():
            self._env.conversations.source.claim(opening.draw.origin)

    def stats(self) -> dict[str, Any]:
        """See :meth:`Path.stats`."""
        env = self._env
        going_on = [at for at, goes_on in zip(env.openings, env.in_progress, strict=True) if at is not None and goes_on]
        return {
            "conversations_in_progress": len(going_on),
            "conversations_dropped": self._dropped + env.num_dropped,
            "conversations_undelivered": len(self._undelivered),
            "conversations_unfinished": names_of([*self._undelivered.values(), *going_on]),
            "turns_ahead": 0,
        }


def names_of(openings: Iterable[Opening]) -> list[str]:
    """Names of conversations, for people; each once."""
    origins = dict.fromkeys(opening.draw.origin for opening in openings)
    return [f"prompt {each.index} (epoch {each.epoch}, repeat {each.repeat})" for each in origins]


def renamed(openings: dict[int, Opening], held: Iterable[tuple[int, TensorDictBase]]) -> dict[int, Opening]:
    """Conversations by the ids that their trajectories have now, which their first frames tell."""
    known = {(at.draw.origin.group, at.draw.origin.repeat): at for at in openings.values()}
    found = {}
    for number, frame in held:
        place = tuple(int(frame.get(key).reshape(-1)[0]) for key in ("group_id", "repeat"))
        if place in known:
            found[number] = known[place]
    return found


def acted_on_others(
    act: Callable[[TensorDictBase], TensorDictBase], current: TensorDictBase, rows: list[int]
) -> TensorDictBase:
    """``act`` on a current TensorDict ``[slots]`` without ``rows``, which repeat the first one of the others."""
    each: list[Any] = list(current.unbind(0))
    others = [row for row in range(len(each)) if row not in rows]
    acted = act(LazyStackedTensorDict(*[each[row] for row in others], stack_dim=0)).unbind(0)
    for row, made in zip(others, acted, strict=True):
        each[row] = made
    for row in rows:
        each[row] = acted[0].copy()
    return LazyStackedTensorDict(*each, stack_dim=0)


def blanked(frame: TensorDictBase, rows: list[int]) -> TensorDictBase:
    """A frame ``[slots]`` whose ``rows`` hold no turn: their ids are -1, see :func:`empty_record`."""
    if not rows:
        return frame
    each: list[Any] = list(frame.unbind(0))
    for row in rows:
        made = each[row]
        blank = empty_record(made) if type(made) is TensorDict else blank_frame([made])
        if blank.get(TRAJ_IDS, None) is not None:
            blank.set(TRAJ_IDS, torch.tensor(-1))
        each[row] = blank
    return LazyStackedTensorDict(*each, stack_dim=0)
