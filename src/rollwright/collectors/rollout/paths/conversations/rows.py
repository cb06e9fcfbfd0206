"""ConversationRows: which conversations the rows of an environment on TensorDicts are in, and where they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright.collectors.core import DataCursor
from rollwright.collectors.rollout.paths.conversations.saving import end_in_parts
from rollwright.collectors.rollout.state import td_from, td_state
from rollwright.data.layout import TRAJ_IDS, blank_frame
from rollwright.data.llm.records import empty_record
from rollwright.data.llm.turns import Origin
from rollwright.envs.base import EnvBase
from rollwright.envs.checkpoint import load_env, save_env
from rollwright.envs.checkpoint.packed import packed, unpacked
from rollwright.envs.llm.core import Opening
from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.llm.undelivered import Undelivered

__all__ = ["ConversationRows", "acted_on_others", "blanked", "renamed", "rows_of"]


def rows_of(env: EnvBase, *, delivers_whole: bool) -> ConversationRows | None:
    """The rows of an environment of conversations, with or without transforms; None: it is none."""
    return None if _inside(env) is None else ConversationRows(env, delivers_whole=delivers_whole)


def _inside(env: EnvBase) -> ConversationEnv | None:
    inside: Any = env
    while inside is not None and not isinstance(inside, ConversationEnv):
        inside = vars(inside).get("base_env") or getattr(inside, "_modules", {}).get("base_env")
    return inside if isinstance(inside, ConversationEnv) else None


class _Mark(NamedTuple):
    """Where a batch began.

    Attributes:
        progress: of the conversations.
        current: what its first step was taken from.
        ended: conversations that had ended, by trajectory id.
    """

    progress: Mapping[str, Any]
    current: TensorDictBase
    ended: Mapping[int, Opening]


class ConversationRows(DataCursor):
    """Follows the conversations of an environment, step by step, and has its :class:`Undelivered` know of their ends.

    Args:
        env: an environment of conversations, with or without transforms.
        delivers_whole: whether complete conversations are delivered, and those that ended are held until then.

    Attributes:
        current: returns what the next step is taken from, of the path that takes the steps; None: a reset comes first.
    """

    offers_again = True

    def __init__(self, env: EnvBase, *, delivers_whole: bool) -> None:
        self.current: Callable[[], TensorDictBase | None] = lambda: None
        self._outer, self._delivers_whole = env, delivers_whole
        self._now: list[Opening | None] = []
        self._ended: dict[int, Opening] = {}  # in the current batch, by trajectory id
        self._mark: _Mark | None = None
        self._partly: set[Origin] = set()  # conversations of which turns were delivered, and which go on
        self._taken: dict[Origin, Opening] = {}  # of the conversations that steps were taken in, since the mark

    @property
    def _env(self) -> ConversationEnv:
        env = _inside(self._outer)  # another one where it was recreated
        assert env is not None
        return env

    @property
    def undelivered(self) -> Undelivered:
        """The conversations that nobody got."""
        return self._env.undelivered

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """See :attr:`DataCursor.is_over`."""
        return self._env.is_over

    # A rollout ----------------------------------------------------------------------------------------

    def begin(self, current: TensorDictBase) -> None:
        """A batch begins: note where, for :meth:`go_back`.

        Args:
            current: what the first step is taken from.
        """
        self._mark, self._taken = None, {}
        if self._delivers_whole:
            return
        self._note_parts()
        with suppress(Exception):  # conversations may refuse to be saved in any way; they begin again then
            self._mark = _Mark(self._env.progress(), current.copy(), self.undelivered.openings)

    def before_step(self) -> list[int]:
        """Note which conversations a step is taken in; returns the rows that have none."""
        self._now = self._env.openings
        self._taken.update((opening.draw.origin, opening) for opening in self._now if opening is not None)
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
        return ended & torch.tensor([opening is not None for opening in self._env.openings], device="cpu")

    def finish(self, *, renew: bool) -> None:
        """The batch is complete.

        Args:
            renew: end what is in progress, and begin the next conversations.
        """
        self.undelivered.ended(self._ended)
        self._ended = {}
        if renew:
            self._env.renew()

    def go_back(self) -> TensorDictBase | None:
        """Nobody gets the last batch: go on from where it began.

        Returns:
            What its first step was taken from; None: a reset comes first, and what was in progress begins again.
        """
        if self._mark is None:
            self.start_over()
            return None
        self._ended = {}
        self.undelivered.go_back(self._mark.ended)
        self._env.go_back(self._mark.progress, self._taken.values())
        return self._mark.current.copy()

    def _note_parts(self) -> None:
        self._partly = {opening.draw.origin for opening in self._in_parts}

    def delivered(self, ids: Iterable[int] | None = None) -> None:
        """See :meth:`DataCursor.delivered`."""
        self._mark = None
        if not self._delivers_whole:
            self._note_parts()
        self.undelivered.delivered(ids)

    def dropped(self) -> None:
        """See :meth:`DataCursor.dropped`."""
        self.undelivered.dropped()

    def start_over(self) -> None:
        """After an error: what nobody got begins again, and what was delivered in part ends."""
        ended, self._ended, self._mark = list(self._ended.values()), {}, None
        env, partly = self._env, self._partly
        if not self._delivers_whole:  # those that ended in a batch that nobody got, too
            numbers = [number for number, at in env.undelivered.openings.items() if at.draw.origin in partly]
            ended += env.undelivered.take(numbers)
        found = {opening.draw.origin: opening for opening in [*ended, *env.interrupted()]}
        again = [opening for origin, opening in found.items() if origin not in partly]
        env.undelivered.start_over(again, holds_ended=self._delivers_whole)
        self._partly = set()
        end_in_parts(env.undelivered, [opening for origin, opening in found.items() if origin in partly])

    def hand_over(self) -> tuple[list[Opening], dict[Any, Opening], int]:
        """See :meth:`TurnPath.hand_over`; what was begun by hand, before there was a collector, is dropped."""
        env, undelivered, partly = self._env, self.undelivered, self._partly
        if not self._now:  # no step was taken here
            return env.hand_over(), {}, 0
        found = {at.draw.origin: at for at in [*undelivered.again, *env.interrupted()]}
        ended = undelivered.openings if self._delivers_whole else {}
        undelivered.forget()
        undelivered.drop([at for origin, at in found.items() if origin in partly])
        self._now, self._partly, self._mark = [], set(), None
        dropped, undelivered.num_dropped = undelivered.num_dropped, 0
        return [at for origin, at in found.items() if origin not in partly], ended, dropped

    def take_over(self, openings: Iterable[Opening], ended: Mapping[Any, Opening], num_dropped: int) -> None:
        """See :meth:`TurnPath.take_over`."""
        self.undelivered.num_dropped += num_dropped
        self.undelivered.begin_again(openings)
        self.undelivered.load_ended({**self.undelivered.openings, **ended})

    def forget(self) -> None:
        """See :meth:`Path.forget`."""
        self._ended, self._mark, self._partly = {}, None, set()
        self._env.abandon()
        self.undelivered.forget()

    def row_ids(self, ids: Any) -> Any:
        """Ids of the trajectories that rows go on with; -1 where a row has no conversation, or begins one."""
        return np.where(self._env.in_progress, ids, -1)

    # State --------------------------------------------------------------------------------------------

    def save_undelivered(self) -> torch.Tensor:
        """See :meth:`DataCursor.save_undelivered`."""
        return self.undelivered.save_ended()

    def load_undelivered(self, saved: torch.Tensor | None, held: Iterable[tuple[int, TensorDictBase]]) -> None:
        """See :meth:`DataCursor.load_undelivered`."""
        if saved is not None:
            self.undelivered.load_ended(renamed(unpacked(saved), held))

    @property
    def _in_parts(self) -> list[Opening]:
        """Conversations of which turns were delivered, and which go on."""
        if self._delivers_whole:
            return []
        env = self._env
        return [at for at, goes_on in zip(env.openings, env.in_progress, strict=True) if at is not None and goes_on]

    def save_parts(self) -> tuple[torch.Tensor, list[str]]:
        """See :meth:`DataCursor.save_parts`."""
        saved = {"openings": self._in_parts, "dropped": self.undelivered.num_dropped}
        return packed(saved), Undelivered.names(self._in_parts)

    def end_parts(self, saved: torch.Tensor) -> None:
        """See :meth:`DataCursor.end_parts`."""
        found, source = unpacked(saved), self._env.conversations.source
        self.undelivered.num_dropped = found["dropped"]
        self.undelivered.drop(found["openings"])
        source.load_state_dict(source.state_dict())  # groups are as large as what is left of them
        if found["openings"]:
            self._env.renew()  # they may have been the last ones

    def place(self, ids: Iterable[int] | None = ()) -> dict[str, Any]:
        """See :meth:`DataCursor.place`: of whole conversations, where the data is; of turns, all in progress, too."""
        current = self.current()
        undelivered, source = self.undelivered, self._env.conversations.source
        done, left = undelivered.split(ids)
        place = {"source": source.state_dict(), "also": [opening.draw.origin for opening in done]}
        if self._delivers_whole or current is None:
            return {**place, "in_parts": self.save_parts()[0]}
        checkpoint = save_env(self._outer)
        if checkpoint.unsaved:
            return {**place, "in_parts": self.save_parts()[0]}
        env = self._outer.state_dict()
        return {**place, "left": left, "env": env, "checkpoint": checkpoint.state, "current": td_state(current)}

    def load_place(self, place: Mapping[str, Any]) -> TensorDictBase | None:
        """Go on from a :meth:`place`; returns what the next step is taken from, None: a reset comes first."""
        self.forget()
        undelivered, source = self.undelivered, self._env.conversations.source
        if "env" in place:  # of transforms, too
            self._outer.load_state_dict(place["env"])
        source.load_state_dict(place["source"])
        for origin in place["also"]:
            source.delivered(origin)
        source.load_state_dict(source.state_dict())  # groups are as large as what is left of them
        if "checkpoint" not in place:
            self.end_parts(place["in_parts"])
            return None
        load_env(self._outer, place["checkpoint"])
        undelivered.load_ended(place["left"])
        return td_from(place["current"])

    def look_ahead(self) -> None:
        """See :meth:`DataCursor.look_ahead`: the next reset shows what is begun here."""
        if self.current() is None:
            self._env.renew()

    def stats(self) -> dict[str, Any]:
        """See :meth:`Path.stats`."""
        env, undelivered = self._env, self.undelivered
        going_on = [at for at, goes_on in zip(env.openings, env.in_progress, strict=True) if at is not None and goes_on]
        return {
            "conversations_in_progress": len(going_on),
            "conversations_dropped": undelivered.num_dropped,
            "conversations_undelivered": len(undelivered),
            "conversations_unfinished": undelivered.names(
                [*undelivered.openings.values(), *undelivered.again, *going_on]
            ),
            "turns_ahead": 0,
        }


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
            blank.set(TRAJ_IDS, torch.tensor(-1, device="cpu"))
        each[row] = blank
    return LazyStackedTensorDict(*each, stack_dim=0)
