"""ConversationPoolPath: a pool of environments of one conversation each; its place in the data follows delivery."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.collectors.core import DataCursor
from rollwright.collectors.rollout.paths.conversations.pool_notes import (
    AskedStep,
    EndedConversation,
    Notes,
    loaded_frames,
    name_of,
    saved_frames,
    text_of,
)
from rollwright.collectors.rollout.paths.conversations.saving import Names, line_of_lost, warn_of_parts
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.collectors.rollout.paths.pool import PoolFrame, PoolPath
from rollwright.collectors.rollout.state import td_from, td_state
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.checkpoint.packed import packed, unpacked
from rollwright.errors import EnvError
from rollwright.modules.signature import Call

__all__ = ["ConversationPoolPath", "is_pool_of_conversations"]

_MANY = 16  # notes that an environment is sent without a need


def is_pool_of_conversations(env: AsyncEnvPool) -> bool:
    """Whether each environment of a pool is one of a single conversation (``LLMEnv``), with transforms or not."""
    return env.ndim == 2 and env.batch_size[1] == 1 and hasattr(env, "keep_ended")


class ConversationPoolPath(PoolPath, DataCursor):
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

    offers_again = True

    def __init__(self, parts: PathParts, env: AsyncEnvPool, call: Call, *, fresh_outputs: bool) -> None:
        super().__init__(parts, env, call, fresh_outputs=fresh_outputs)
        env.keep_ended()
        self.cursor, self._keeps_place = self, False
        self._every = range(env.num_envs)
        self._resets = parts.options.reset_at_each_iter
        self._over: set[int] = set()  # environments whose data is over
        self._undelivered: dict[int, EndedConversation] = {}  # in batches, by trajectory id
        self._last: list[int] = []  # of them, those of the last batch
        self._finished: list[PoolFrame] = []  # the last batch, until it is delivered
        self._notes = [Notes() for _ in self._every]
        self._where = [""] * env.num_envs  # names of the conversations in progress
        self._asked: dict[int, AskedStep] = {}  # steps that were asked for, where the place is kept
        self._num_dropped = 0

    # Frames -------------------------------------------------------------------------------------------

    def _sent(self, acted: TensorDictBase) -> TensorDictBase:
        rows = [LazyStackedTensorDict(row, stack_dim=0) for row in acted.unbind(0)]
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def _take(self, index: int, frame: TensorDictBase, root: TensorDictBase, over: bool) -> None:
        frame, root = frame[0].copy(), root[0]
        name = name_of(frame)
        for td in (frame, frame.get("next")):
            if (group := td.get("group_id", None)) is not None:
                td.set("group_id", group * len(self._every) + index)
        super()._take(index, frame, root, over)
        self._where[index] = text_of(root)
        if over and name_of(root) == name:  # it repeats what has ended: there is no other one
            del self._roots[index]
            self._over.add(index)

    def _receive(self, index: int | None = None) -> None:
        before = set(self._env.busy)
        try:
            super()._receive(index)
        except EnvError as error:
            busy = set(self._env.busy)
            failed = sorted(place for place in before - busy if place not in self._roots and place not in self._over)
            if not failed or any(self._where[place] in str(error) for place in failed):
                raise
            where = ", ".join(f"{self._where[place]}, turn {self._totals[place][1]}" for place in failed)
            raise EnvError(f"the conversation of {where}: {error}") from error

    def _named(self, frame: PoolFrame) -> EndedConversation:
        group, repeat = name_of(frame.td)
        return EndedConversation(frame.env_index, (group // len(self._every), repeat), text_of(frame.td))

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
            gone = [frame for frame in (*self._held[index], *self._row) if frame.env_index == index]
            self._num_dropped += len(
                {frame.id for frame in gone} | ({self._id[index]} if self._began(index) else set())
            )
            self._notes[index].dropped += [self._named(frame).name for frame in gone if frame.ended is not None]
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
            return
        self._over.discard(index)
        self._env.async_reset_send(env_index=[index])
        self._roots[index] = root = self._env.async_reset_recv(env_index=[index])[0][0]
        self._where[index] = text_of(root)

    def _flush(self, index: int) -> None:
        notes, self._notes[index] = self._notes[index], Notes()
        if len(notes):
            self._env.call(index, "note", notes.delivered, notes.dropped)

    # A rollout ----------------------------------------------------------------------------------------

    def begin(self, *, random: bool) -> None:
        """See :meth:`Path.begin`."""
        super().begin(random=random)
        self._finished = []
        self._fill()

    def _fill(self) -> None:
        """Begin conversations in environments that have none: their last one has failed, or was not saved."""
        busy = set(self._env.busy)
        for index in self._every:
            if index not in busy and index not in self._roots and index not in self._over:
                self._id[index] = int(self._ids.take(1)[0])
                self._open(index)

    def act(self, t: int) -> None:
        """See :meth:`Path.act`."""
        for index in self._roots:
            if len(self._notes[index]) >= _MANY:
                self._flush(index)
        if self._keeps_place:
            self._asked |= {index: AskedStep(root, *self._save(index)) for index, root in self._roots.items()}
        super().act(t)

    def finish(self, steps: int) -> TensorDictBase:
        """See :meth:`Path.finish`."""
        self._finished = taken = list(self._batch)
        found = super().finish(steps)
        ended = {frame.id: self._named(frame) for frame in taken if frame.ended is not None}
        self._undelivered |= ended
        self._last = list(ended)
        if self._resets:  # now, so that it shows whether the data is over
            self._renew(self._every)
        return found

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """See :attr:`DataCursor.is_over`."""
        return len(self._over) == len(self._every) and not self._row

    # What nobody gets ---------------------------------------------------------------------------------

    @property
    def current(self) -> TensorDictBase | None:
        """See :attr:`Path.current`: None; each environment has one of its own."""
        return None

    @current.setter
    def current(self, current: TensorDictBase | None) -> None:
        """Begin again what nobody got."""
        self._settle(self._every)
        held = self._undelivered if self._delivers_whole else {}  # of earlier batches: they will be delivered
        for index in self._every:
            self._flush(index)
            self._env.call(index, "begin_again", [each.name for each in held.values() if each.env_index == index])
        self._undelivered = dict(held)
        self._empty()

    def forget(self) -> None:
        """See :meth:`Path.forget`."""
        self._settle(self._every)
        self._env.forget_conversations()
        self._undelivered = {}
        self._notes = [Notes() for _ in self._every]
        self._empty()

    def _empty(self) -> None:
        self._roots.clear()
        self._row.clear()
        self._over.clear()
        self._batch, self._finished, self._last = [], [], []
        self._totals, self._held = [(0.0, 0) for _ in self._every], [[] for _ in self._every]
        self._started = False

    def go_back(self, *, keeps: bool = True) -> None:
        """See :meth:`Path.go_back`; an environment that has failed begins its conversation again."""
        if not keeps or self._delivers_whole or not self._started:
            self.current = None
            return
        for number in self._last:
            self._undelivered.pop(number, None)
        self._row.extendleft(reversed(self._finished or self._batch))
        self._batch, self._finished, self._last = [], [], []
        busy = set(self._env.busy)
        for index in self._every:
            if index not in busy and index not in self._roots and index not in self._over:
                self._begin_again(index)

    def _begin_again(self, index: int) -> None:
        """Have an environment begin its conversation again, with the next batch; one delivered in part ends."""
        number, in_parts = self._id[index], self._is_in_parts(index)
        self._env.call(index, "begin_again", None, in_parts)
        if in_parts:
            self._num_dropped += 1
            warn_of_parts([self._where[index]])
        self._totals[index], self._held[index] = (0.0, 0), []  # once, however often it goes back
        self._row = deque(frame for frame in self._row if frame.id != number)

    def _is_in_parts(self, index: int) -> bool:
        """Whether turns of a conversation were delivered, which goes on."""
        number = self._id[index]
        left = sum(frame.id == number for frame in self._row) + len(self._held[index])
        return not self._delivers_whole and self._totals[index][1] > left

    # Delivery -----------------------------------------------------------------------------------------

    def keep_place(self) -> None:
        """See :meth:`DataCursor.keep_place`."""
        self._keeps_place = True

    def _found(self, ids: Iterable[int]) -> list[EndedConversation]:
        return [self._undelivered.pop(number) for number in list(ids) if number in self._undelivered]

    def delivered(self, ids: Iterable[int] | None = None) -> None:
        """See :meth:`DataCursor.delivered`."""
        self._finished = []
        for each in self._found(self._last if ids is None else ids):
            self._notes[each.env_index].delivered.append(each.name)

    def dropped(self) -> None:
        """See :meth:`DataCursor.dropped`."""
        self._num_dropped += len(self._undelivered)
        for each in self._found(self._undelivered):
            self._notes[each.env_index].dropped.append(each.name)

    def load_undelivered(self, saved: torch.Tensor | None, held: Iterable[tuple[int, TensorDictBase]]) -> None:
        """See :meth:`DataCursor.load_undelivered`: they have the ids that the delivery gave them."""
        known = {(each.env_index, each.name): each for each in self._undelivered.values()}
        self._undelivered = {}
        for number, frame in held:
            found = self._named(PoolFrame(frame[0], number, -1, None))
            index = int(frame.get("group_id").reshape(-1)[0]) % len(self._every)
            if (each := known.get((index, found.name))) is not None:
                self._undelivered[number] = each

    # State --------------------------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], list[str]]:
        """See :meth:`Path.state_dict`; waits for steps that are in progress."""
        unsaved: list[str] = []
        for index in self._env.busy:
            try:
                self._receive(index)
            except EnvError as error:
                self._begin_again(index)
                unsaved.append(f"{self._where[index]} begins again: {error}")
        state, lost = self._state()
        return state, unsaved + lost

    def _save(self, index: int) -> tuple[dict[str, Any], str | None]:
        """What an environment saves, see :meth:`Pooled.save_conversation`."""
        self._flush(index)
        saved: tuple[dict[str, Any], str | None] = self._env.call(index, "save_conversation")
        return saved

    def _state(self) -> tuple[dict[str, Any], list[str]]:
        """What is in progress, and what of it cannot be saved; of a step in progress, what was before it."""
        waits = {index: self._asked[index] for index in self._env.busy}
        roots = {**self._roots, **{index: asked.root for index, asked in waits.items()}}
        envs, again, unsaved = list[torch.Tensor](), set[int](), list[str]()
        also, ends = list[EndedConversation](), list[EndedConversation]()  # delivered, or dropped; cut short
        for index in self._every:
            state, reason = waits[index][1:] if index in waits else self._save(index)
            envs.append(packed(state))
            if index in waits:  # what it was not told yet
                names = [*self._notes[index].delivered, *self._notes[index].dropped]
                also += [EndedConversation(index, name, "") for name in names]
            if reason is not None:
                again.add(self._id[index])
                if in_parts := self._is_in_parts(index):
                    ends.append(EndedConversation(index, name_of(roots[index]), self._where[index]))
                if self._began(index):
                    unsaved.append(line_of_lost(self._where[index], in_parts=in_parts, reason=reason))
        ids = self.row_ids()
        state = {
            "envs": envs,
            "roots": [td_state(roots.get(index) if self._id[index] not in again else None) for index in self._every],
            "ids": list(self._id),
            "totals": [list(each) for each in self._totals],
            "held": [saved_frames(frames, again) for frames in self._held],
            "row": saved_frames(self._row, again),
            "over": sorted(self._over),
            "undelivered": packed(self._undelivered),
            "also": packed(also + ends),
            "dropped": self._num_dropped + len(ends),
            "row_ids": None if ids is None else torch.from_numpy(ids),
        }
        return state, unsaved

    def place(self, ids: Iterable[int] | None = ()) -> dict[str, Any]:
        """See :meth:`DataCursor.place`; waits for no step: of those in progress, what was before them is kept."""
        for index in set(self._env.busy) - self._asked.keys():  # it was asked for before the place was kept
            self._receive(index)
        state, _ = self._state()
        named = set(self._last if ids is None else ids)
        done = [each for number, each in self._undelivered.items() if number in named]
        also = packed([*unpacked(state["also"]), *done])
        if not self._delivers_whole:
            left = {number: each for number, each in self._undelivered.items() if number not in named}
            return {**state, "undelivered": packed(left), "also": also}
        sources = [unpacked(saved)["source"] for saved in state["envs"]]  # what was not delivered begins again
        nothing = {"undelivered": packed({}), "again": packed([]), "dropped": 0, "progress": None}
        return {
            **state,
            "envs": [packed({"source": source, **nothing}) for source in sources],
            "roots": [None] * len(sources),
            "undelivered": packed({}),
            "also": also,
            "row_ids": None,
        }

    def look_ahead(self) -> None:
        """See :meth:`DataCursor.look_ahead`."""
        if self._started:
            self._fill()
        else:
            self._renew(self._every)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`Path.check_state`.

        Raises:
            ValueError: it was saved with another number of environments, or of another environment.
        """
        if len(state_dict.get("envs", ())) != len(self._every):
            raise ValueError(
                f"state_dict: expected that of a pool of {len(self._every)} environments, got one of "
                f"{len(state_dict.get('envs', ()))}. Make the pool as the one that was saved."
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], *, ids_are_free: bool) -> None:
        """See :meth:`Path.load_state_dict`."""
        self.forget()
        also: list[EndedConversation] = unpacked(state_dict["also"]) if "also" in state_dict else []
        names = Names(None if ids_are_free else lambda: int(self._ids.take(1)[0]))
        for index in self._every:
            names_of_delivered = [each.name for each in also if each.env_index == index]
            self._env.call(index, "load_conversation", unpacked(state_dict["envs"][index]), names_of_delivered)
            if (root := td_from(state_dict["roots"][index])) is not None:
                self._roots[index] = root
                self._where[index] = text_of(root)
        self._undelivered = {names.of(number): each for number, each in unpacked(state_dict["undelivered"]).items()}
        self._num_dropped = int(state_dict["dropped"])
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
        begun = [index for index in self._every if self._began(index)]
        ended = [self._named(frame) for frame in self._row if frame.ended is not None]
        texts = [each.text for each in (*self._undelivered.values(), *ended)] + [self._where[index] for index in begun]
        return {
            **super().stats(),
            "conversations_in_progress": len(begun),
            "conversations_dropped": self._num_dropped,
            "conversations_undelivered": len(self._undelivered),
            "conversations_unfinished": list(dict.fromkeys(texts)),
        }
