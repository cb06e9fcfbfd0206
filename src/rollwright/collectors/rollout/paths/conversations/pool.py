"""ConversationPoolPath: a pool of environments of one conversation each; its place in the data follows delivery."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor, Names, Saved
from rollwright.collectors.rollout.paths.conversations.pool_notes import (
    PoolNotes,
    loaded_frames,
    opening_of,
    saved_frames,
)
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.collectors.rollout.paths.pool import PoolFrame, PoolPath
from rollwright.collectors.rollout.state import td_from, td_state
from rollwright.data.llm.turns import Origin
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.core import Conversations, Opening
from rollwright.envs.llm.undelivered import Undelivered
from rollwright.errors import EnvError
from rollwright.modules.signature import Call

_SavedEnv = tuple[dict[str, Any], str | None]  # its state, and why its conversation begins again
_Before = tuple[TensorDictBase, _SavedEnv]  # what a step is taken from
_MANY = 16  # notes that an environment is sent without a need


def is_pool_of_conversations(env: AsyncEnvPool) -> bool:
    """Whether each environment of a pool is one of a single conversation (``LLMEnv``), with transforms or not."""
    return env.ndim == 2 and env.batch_size[1] == 1 and hasattr(env, "keep_ended")


class ConversationPoolPath(PoolPath):
    """A :class:`PoolPath` of conversations: each environment of the pool has one at a time, and its own data.

    A conversation that was drawn and not delivered is drawn again after a restore; those in progress are saved. Groups
    of different environments have different ids: ``group_id`` of a record is that of its environment, times the number
    of environments, plus the index of the environment.

    Args:
        parts: what it is made of.
        env: the pool, each of its environments of batch size ``[1]``.
        call: calls the policy.
        fresh_outputs: whether its outputs are new tensors at each call.
    """

    cursor: ConversationCursor
    sizes = None

    def __init__(self, parts: PathParts, env: AsyncEnvPool, call: Call, *, fresh_outputs: bool) -> None:
        super().__init__(parts, env, call, fresh_outputs=fresh_outputs)
        env.keep_ended()
        self._every = range(env.num_envs)
        self._notes = PoolNotes(env.num_envs)
        undelivered = Undelivered(cast(Conversations, self._notes))  # of which it uses the source
        self.cursor = ConversationCursor(lambda: undelivered, parts.ids, delivers_whole=self._delivers_whole)
        self.cursor.follow(self)
        self._resets = parts.options.reset_at_each_iter
        self._over: set[int] = set()  # environments whose data is over
        self._at: list[Opening | None] = [None] * env.num_envs  # conversations in progress
        self._asked: dict[int, _Before] = {}  # before steps that were asked for, where the place is kept

    # Frames -------------------------------------------------------------------------------------------

    def _sent(self, acted: TensorDictBase) -> TensorDictBase:
        rows = [LazyStackedTensorDict(row, stack_dim=0) for row in acted.unbind(0)]
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def _take(self, index: int, frame: TensorDictBase, root: TensorDictBase, over: bool) -> None:
        frame, root = frame[0].copy(), root[0]
        for td in (frame, frame.get("next")):
            if (group := td.get("group_id", None)) is not None:
                td.set("group_id", group * len(self._every) + index)
        super()._take(index, frame, root, over)
        self._at[index] = self._begun_at(index, root)
        if over and self._at[index] == opening_of(frame):  # it repeats what has ended: there is no other one
            del self._roots[index]
            self._at[index] = None
            self._over.add(index)

    def _begun_at(self, index: int, root: TensorDictBase) -> Opening:
        return opening_of(root.copy().set("group_id", root.get("group_id") * len(self._every) + index))

    def _name(self, index: int) -> str:
        at = self._at[index]
        return "" if at is None else at.draw.origin.name

    def _receive(self, index: int | None = None) -> None:
        before = set(self._env.busy)
        try:
            super()._receive(index)
        except EnvError as error:
            failed = sorted(before & self._idle())
            if not failed or any(self._name(place) in str(error) for place in failed):
                raise
            where = ", ".join(f"{self._name(place)}, turn {self._totals[place][1]}" for place in failed)
            raise EnvError(f"the conversation of {where}: {error}") from error

    def _idle(self) -> set[int]:
        """Environments without a conversation: their last one has failed, or was not saved."""
        return {*self._every} - {*self._env.busy} - self._roots.keys() - self._over

    # Beginning ----------------------------------------------------------------------------------------

    def reset(self, **kwargs: Any) -> None:
        """See :meth:`Path.reset`; what is in progress is dropped, one in which nothing was answered yet stays."""
        self._renew(self._every)
        self._started = True
        if self.is_over:
            raise EnvError(
                "env: there is no prompt to begin a conversation with: the data of all environments of the pool is "
                "empty, or over. Pass more data, or more epochs."
            )

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """See :meth:`Path.reset_some`."""
        self._renew(marked.reshape(-1).nonzero().reshape(-1).tolist())

    def _renew(self, chosen: Iterable[int]) -> None:
        """End what is in progress, on purpose, and begin the next conversations."""
        chosen = list(chosen)
        self._settle(chosen)
        for index in chosen:
            frames = [frame for frame in (*self._held[index], *self._row) if frame.env_index == index]
            gone = {frame.id: opening_of(frame.td) for frame in frames}
            if (at := self._at[index]) is not None and self._began(index):
                gone[self._id[index]] = at
            self.cursor.undelivered.drop(gone.values())
        self._row = deque(frame for frame in self._row if frame.env_index not in chosen)
        for index in chosen:
            self._open(index)

    def _began(self, index: int) -> bool:
        return self._totals[index][1] > 0

    def _settle(self, chosen: Iterable[int]) -> None:
        """Wait for steps that are in progress."""
        for index in set(chosen) & set(self._env.busy):
            with suppress(EnvError):  # of an environment that begins another conversation next
                self._receive(index)

    def _open(self, index: int) -> None:
        """Have an environment begin its next conversation, if there is one."""
        self._flush(index)
        self._roots.pop(index, None)
        self._totals[index], self._held[index] = (0.0, 0), []
        if not self._env.call(index, "next_conversation"):
            self._over.add(index)
            self._at[index] = None
            return
        self._over.discard(index)
        self._env.async_reset_send(env_index=[index])
        self._roots[index] = root = self._env.async_reset_recv(env_index=[index])[0][0]
        self._at[index] = self._begun_at(index, root)

    def _flush(self, index: int) -> None:
        """Tell an environment what has come of its conversations."""
        undelivered, notes = self.cursor.undelivered, self._notes
        done, found = notes.take(index), list(undelivered.again)
        again = [at.draw.origin for at in found if notes.env_of(at.draw.origin) == index]
        if done or again:
            undelivered.again = deque(at for at in found if notes.env_of(at.draw.origin) != index)
            self._env.call(index, "note", done, [notes.name_of(origin) for origin in again])

    # A rollout ----------------------------------------------------------------------------------------

    def begin(self, *, random: bool) -> None:
        """See :meth:`Path.begin`."""
        super().begin(random=random)
        self.cursor.begin(self._batch)
        self._fill()

    def _fill(self) -> None:
        """Begin conversations in environments that have none."""
        for index in sorted(self._idle()):
            self._id[index] = self.cursor.fresh_id()
            self._open(index)

    def act(self, t: int) -> None:
        """See :meth:`Path.act`."""
        for index in self._roots:
            if len(self._notes.of[index]) >= _MANY:
                self._flush(index)
        if self.cursor.keeps_place:
            self._asked |= {index: (root, self._save(index)) for index, root in self._roots.items()}
        super().act(t)

    def finish(self, steps: int) -> TensorDictBase:
        """See :meth:`Path.finish`."""
        taken, found = self._batch, super().finish(steps)
        ended = {frame.id: opening_of(frame.td) for frame in taken if frame.ended is not None}
        self.cursor.finish((opening_of(frame.td) for frame in taken), ended)
        if self._resets:  # now, so that it shows whether the data is over
            self._renew(self._every)
        return found

    # What nobody gets ---------------------------------------------------------------------------------

    @property
    def current(self) -> TensorDictBase | None:
        """See :attr:`Path.current`: None; each environment has one of its own."""
        return None

    @current.setter
    def current(self, current: TensorDictBase | None) -> None:
        """Begin again what nobody got."""
        self.cursor.start_over()

    def forget(self) -> None:
        """See :meth:`Path.forget`."""
        self.cursor.forget()
        self._env.forget_conversations()
        self._notes.clear()

    def _fail(self, index: int) -> Opening | None:
        """The conversation of an environment cannot go on: drop its frames; returns which it is."""
        number = self._id[index]
        self._totals[index], self._held[index] = (0.0, 0), []
        self._row = deque(frame for frame in self._row if frame.id != number)
        at, self._at[index] = self._at[index], None
        return at

    # What its cursor asks of it -----------------------------------------------------------------------

    only_rest = False  # an error takes them all back

    @property
    def is_over(self) -> bool:
        """See :attr:`InProgress.is_over`."""
        return len(self._over) == len(self._every) and not self._row

    def delivered(self) -> None:
        """See :meth:`InProgress.delivered`."""

    def begun(self) -> list[Opening]:
        """See :meth:`InProgress.begun`."""
        going_on = [at for index, at in enumerate(self._at) if at is not None and self._began(index)]
        return [opening_of(frame.td) for frame in self._row] + going_on

    def interrupt(self) -> list[Opening]:
        """See :meth:`InProgress.interrupt`; waits for steps that are in progress."""
        self._settle(self._every)
        found = [opening_of(frame.td) for frame in (*self._batch, *self._row)]
        found += [at for at in self._at if at is not None]
        self._roots.clear()
        self._row.clear()
        self._over.clear()
        self._at = [None for _ in self._every]
        self._totals, self._held = [(0.0, 0) for _ in self._every], [[] for _ in self._every]
        self._batch, self._started = [], False
        return found

    def go_back(self, mark: list[PoolFrame], *, keeps: bool) -> list[Opening]:
        """See :meth:`InProgress.go_back`: frames go back to the row; an environment that failed begins again."""
        if not keeps or self._delivers_whole:
            return [*(opening_of(frame.td) for frame in mark), *self.interrupt()]
        self._row.extendleft(reversed(mark))
        mark.clear()
        return [at for index in sorted(self._idle()) if (at := self._fail(index)) is not None]

    def look_ahead(self) -> None:
        """See :meth:`InProgress.look_ahead`."""
        if self._started:
            self._fill()
        else:
            self._renew(self._every)

    def save(self, *, waits: bool, alone: bool) -> Saved:
        """See :meth:`InProgress.save`."""
        unsaved = self._receive_all() if waits else []
        for index in set(self._env.busy) - self._asked.keys():  # it was asked for before the place was kept
            self._receive(index)
        asked = {index: self._asked[index] for index in self._env.busy}
        roots = {**self._roots, **{index: root for index, (root, _) in asked.items()}}
        lost, again = list[tuple[Opening, str]](), set[int]()
        states, done = list[dict[str, Any]](), list[Origin]()
        for index, at in enumerate(self._at):
            state, reason = asked[index][1] if index in asked else self._save(index)
            states.append(state)
            done += self._notes.of[index]  # what it was not told yet
            if reason is not None and at is not None:
                again.add(self._id[index])
                lost += [(at, reason)] if self._began(index) else []
        if alone:
            nothing = {"undelivered": packed({}), "again": packed([]), "dropped": 0, "progress": None}
            envs = [packed({"source": state["source"], **nothing}) for state in states]
            return Saved({"envs": envs, "roots": [None] * len(envs), "row_ids": None}, done=done)
        ids = self.row_ids()
        found = {
            "envs": [packed(state) for state in states],
            "roots": [td_state(roots.get(index) if self._id[index] not in again else None) for index in self._every],
            "ids": list(self._id),
            "totals": [list(each) for each in self._totals],
            "held": [saved_frames(frames, again) for frames in self._held],
            "row": saved_frames(self._row, again),
            "over": sorted(self._over),
            "row_ids": None if ids is None else torch.from_numpy(ids),
        }
        return Saved(found, lost, unsaved, done)

    def _receive_all(self) -> list[str]:
        """Take the steps that are in progress; returns what could not be taken, for people."""
        unsaved = []
        for index in self._env.busy:
            try:
                self._receive(index)
            except EnvError as error:
                unsaved.append(f"{self._name(index)} begins again: {error}")
                if (at := self._fail(index)) is not None:
                    self.cursor.begin_again([at])
        return unsaved

    def _save(self, index: int) -> _SavedEnv:
        """What an environment saves, see :meth:`Pooled.save_conversation`."""
        self._flush(index)
        return cast(_SavedEnv, self._env.call(index, "save_conversation"))

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`InProgress.check_state`.

        Raises:
            ValueError: it was saved with another number of environments, or of another environment.
        """
        if len(state_dict.get("envs", ())) != len(self._every):
            raise ValueError(
                f"state_dict: expected that of a pool of {len(self._every)} environments, got one of "
                f"{len(state_dict.get('envs', ()))}. Make the pool as the one that was saved."
            )

    def load(self, state_dict: Mapping[str, Any], names: Names, place: Callable[[], None]) -> None:
        """See :meth:`InProgress.load`."""
        self._notes.clear()
        place()
        for index in self._every:
            self._env.call(index, "load_conversation", unpacked(state_dict["envs"][index]), self._notes.take(index))
            if (root := td_from(state_dict["roots"][index])) is not None:
                self._roots[index] = root
                self._at[index] = self._begun_at(index, root)
        if state_dict["row_ids"] is None:
            self._roots.clear()
            return
        self._id = [names.of(number) for number in state_dict["ids"]]
        self._totals = [(total, length) for total, length in state_dict["totals"]]
        self._held = [loaded_frames(frames, names) for frames in state_dict["held"]]
        self._row = deque(loaded_frames(state_dict["row"], names))
        self._over = set(state_dict["over"])
        self._started = True
        self._fill()  # now, so that it shows whether the data is over

    def stats(self) -> dict[str, Any]:
        """See :meth:`Path.stats`."""
        return {**super().stats(), **self.cursor.stats()}
