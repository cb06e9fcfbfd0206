"""ConversationRows: which conversations the rows of an environment on TensorDicts are in, and where they end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._warnings import warn_user
from rollwright.collectors.core import Path, TrajectoryIds
from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor, Names, Saved
from rollwright.collectors.rollout.state import placed, td_from, td_state
from rollwright.data.layout import TRAJ_IDS, blank_frame
from rollwright.data.llm.records import empty_record
from rollwright.data.llm.turns import Origin
from rollwright.envs.base import EnvBase
from rollwright.envs.checkpoint import load_env, save_env, unpacked
from rollwright.envs.llm.core import Conversations, Opening
from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.llm.slot_row import Slots
from rollwright.envs.llm.undelivered import Undelivered


def followed(
    env: EnvBase, ids: TrajectoryIds, *, delivers_whole: bool
) -> tuple[ConversationCursor | None, ConversationRows | None]:
    """What keeps account of the conversations of an environment; and its rows on TensorDicts, where it has those.

    Args:
        env: any environment, with or without transforms.
        ids: hands out trajectory ids.
        delivers_whole: whether complete conversations are delivered, or turns.
    """
    inside, rows = _inside(env), ConversationRows(env)
    if isinstance(inside, ConversationEnv):
        rows.cursor = ConversationCursor(rows.undelivered, ids, delivers_whole=delivers_whole, progress=rows)
        return rows.cursor, rows
    found = getattr(inside, "conversations", None)
    if not isinstance(found, Conversations):
        return None, None
    undelivered = Undelivered(found)
    return ConversationCursor(lambda: undelivered, ids, delivers_whole=delivers_whole), None


def _inside(env: EnvBase) -> Any:
    """An environment without its transforms."""
    inside: Any = env
    while (within := vars(inside).get("base_env") or getattr(inside, "_modules", {}).get("base_env")) is not None:
        inside = within
    return inside


class _Mark(NamedTuple):
    """Where a batch began.

    Attributes:
        progress: of the conversations.
        current: what its first step was taken from.
    """

    progress: Mapping[str, Any]
    current: TensorDictBase


class ConversationRows:
    """Follows the conversations of an environment on TensorDicts, step by step.

    Args:
        env: an environment of conversations, with or without transforms.

    Attributes:
        cursor: keeps account of them.
        path: takes the steps.
    """

    cursor: ConversationCursor
    path: Path
    sizes = None

    def __init__(self, env: EnvBase) -> None:
        self._outer = env
        self._now: list[Opening | None] = []
        self._ended: dict[int, Opening] = {}  # in the current batch, by trajectory id
        self._taken: dict[Origin, Opening] = {}  # of the conversations that steps were taken in, since its begin

    @property
    def _slots(self) -> Slots:
        env: ConversationEnv = _inside(self._outer)  # another one where it was recreated
        return env.slots

    def undelivered(self) -> Undelivered:
        """The conversations that nobody got."""
        return self._slots.undelivered

    # A rollout ----------------------------------------------------------------------------------------

    def begin(self, current: TensorDictBase) -> None:
        """A batch begins: note where, for :meth:`go_back`.

        Args:
            current: what the first step is taken from.
        """
        self._taken, mark = {}, None
        with suppress(Exception):  # conversations may refuse to be saved in any way; they begin again then
            mark = _Mark(self._slots.state(), current.copy())
        self.cursor.begin(mark)

    def before_step(self) -> list[int]:
        """Note which conversations a step is taken in; returns the rows that have none."""
        self._now = self._slots.openings
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

    def following(self, ended: torch.Tensor) -> torch.Tensor:
        """Where a conversation follows one that has ended, bool ``[slots]``."""
        return ended & torch.tensor([opening is not None for opening in self._slots.openings], device="cpu")

    def finish(self, *, renew: bool) -> None:
        """The batch is complete.

        Args:
            renew: end what is in progress, and begin the next conversations.
        """
        self.cursor.finish(self._taken.values(), self._ended)
        self._ended = {}
        if renew:
            self._slots.renew()

    def row_ids(self, ids: Any) -> Any:
        """Ids of the trajectories that rows go on with; -1 where a row has no conversation, or begins one."""
        return np.where(self._slots.in_progress, ids, -1)

    # What its cursor asks of it -----------------------------------------------------------------------

    only_rest = False  # an error takes them all back

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to go on with."""
        return self._slots.is_over

    def delivered(self) -> None:
        """A batch has reached the consumer."""

    def begun(self) -> list[Opening]:
        """Conversations in which something was asked, and which go on, or have turns that were not taken."""
        slots = self._slots
        return [at for at, goes_on in zip(slots.openings, slots.in_progress, strict=True) if at is not None and goes_on]

    def interrupt(self) -> list[Opening]:
        """Take all out, with the turns of the current batch; returns what nobody got."""
        ended, self._ended = list(self._ended.values()), {}
        return [*ended, *self._slots.interrupted()]

    def go_back(self, mark: _Mark, *, keeps: bool) -> list[Opening]:
        """See :meth:`InProgress.go_back`; steps that were taken since are taken again."""
        self._ended = {}
        self._slots.go_back(mark.progress, self._taken.values())
        self.path.current = mark.current.copy()
        return []

    def look_ahead(self) -> None:
        """See :meth:`InProgress.look_ahead`: the next reset shows what is begun here."""
        if self.path.current is None:
            self._slots.renew()

    def save(self, *, waits: bool, alone: bool) -> Saved:
        """See :meth:`InProgress.save`: all conversations, or none."""
        current, ids = self.path.current, self.path.row_ids()
        state: dict[str, Any] = {"row_ids": None if ids is None else torch.from_numpy(ids)}
        if alone:
            return Saved(state)
        state["env"], checkpoint = copy.deepcopy(self._outer.state_dict()), save_env(self._outer)  # of transforms, too
        unsaved = list(checkpoint.unsaved)
        try:
            saved = td_state(current)
        except Exception as error:
            unsaved.append(f"objects in the carrier: cannot be pickled: {type(error).__name__}: {error}")
        if not unsaved:
            return Saved({**state, "checkpoint": checkpoint.state, "current": saved})
        begun = self.begun()
        return Saved(state, [(at, "; ".join(unsaved)) for at in begun], [] if begun else unsaved)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`InProgress.check_state`."""

    def load(self, state_dict: Mapping[str, Any], names: Names, place: Callable[[], None]) -> None:
        """See :meth:`InProgress.load`; trajectory ids are those that were saved."""
        if "env" in state_dict:
            self._outer.load_state_dict(state_dict["env"])
        place()
        try:
            if "checkpoint" in state_dict:
                load_env(self._outer, placed(state_dict["checkpoint"], self._outer.device))
                self.path.current = td_from(state_dict["current"])
                return
        except ValueError as error:
            warn_user(f"load_state_dict: the environment begins anew, with new trajectory ids. {error}", UserWarning)
            place()  # it was undone
            self.cursor.begin_again(unpacked(state_dict["partly"]), warns=False)
        if state_dict["row_ids"] is not None:
            self._slots.renew()  # it may have been the last ones that ended


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
