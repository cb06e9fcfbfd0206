"""TurnPath: an engine answers, conversations follow, on messages and tokens; a TensorDict is made of each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright.collectors.core import Path
from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor, Names, Saved
from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog, EndedTurn
from rollwright.collectors.rollout.paths.conversations.exchange import Exchange
from rollwright.collectors.rollout.paths.conversations.records import RecordMaker
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs, Mark
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.records import RecordLayout
from rollwright.data.llm.turns import Origin
from rollwright.envs.checkpoint.packed import packed, unpacked
from rollwright.envs.llm.core import Conversations, Opening
from rollwright.envs.llm.transforms import TurnHook
from rollwright.errors import EnvError, NotNative
from rollwright.modules.llm.engine import Engine

__all__ = ["TurnPath"]


class TurnPath(Path):
    """Takes turns of conversations: the engine answers, the environment follows.

    One turn of each conversation in turn, ``[*env, T]``; with ``streams``, turns in the order in which they end,
    ``[N]``: conversations whose environment is ready generate while others step. A conversation whose outcome waits for
    others (a reward of a whole group) lets those others go ahead; their turns are kept for the next batch.

    Which tokens are sampled depends on prompt, epoch, repeat, turn and seed alone (:func:`turn_seed`), hence neither on
    the slot nor on the order.

    Args:
        parts: what it is made of.
        conversations: of the environment.
        engine: of the policy.
        hooks: finds what the environment's transforms do with a complete turn; an error where they cannot.
        layout: of records.
        streams: see above.
        how: for ``stats()``.
    """

    calls_policy = False
    cursor: ConversationCursor

    def __init__(
        self,
        parts: PathParts,
        conversations: Conversations,
        engine: Engine,
        *,
        hooks: Callable[[], list[TurnHook]],
        layout: RecordLayout,
        streams: bool,
        how: Mapping[str, str],
    ) -> None:
        self.how = dict(how)
        self._conversations, self._find_hooks, self._streams = conversations, hooks, streams
        self._ids, self._storing = parts.ids, parts.devices.storing
        whole = parts.options.delivers_whole
        self._saves = not (streams and whole)  # else nothing of a conversation in progress was taken
        self._resets = parts.options.reset_at_each_iter
        chain = TokenChain(
            engine.tokenizer,
            conversations.template,
            history=getattr(conversations, "history", "keep"),
            end_token_ids=engine.end_ids,
        ).new
        assert parts.cursor is not None
        self.cursor = parts.cursor
        self._dialogs = Dialogs(
            conversations,
            chain,
            streams=streams,
            holds=whole,
            undelivered=self.cursor.undelivered,
            fresh_id=self._fresh_id,
        )
        self.sizes = len(self._dialogs.rows), len(self._dialogs.slots)
        self._exchange = Exchange(conversations, engine, self._dialogs, hooks=hooks(), before_asking=self._keep_before)
        flat = parts.options.flatten_data and not whole  # else the delivery needs the rows
        self._records = RecordMaker(layout, parts.env.batch_size, flat=flat, streams=streams)
        self._batch: list[list[EndedTurn | None]] = []
        self._ended: list[tuple[float, int]] = []
        self._started = False
        self.cursor.follow(self)

    def check(self) -> None:
        """See :meth:`Path.check`: transforms may have been added."""
        self._exchange.hooks = self._find_hooks()

    def _keep_before(self, dialog: Dialog) -> None:
        """Keep what is needed of a conversation whose turn may not be complete when the batch is."""
        ahead = self._streams or self._dialogs.row_of(dialog)
        dialog.before = self._dialogs.before_answer(dialog) if ahead and dialog.number and self._saves else None

    # The conversations --------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """See :attr:`Path.started`."""
        return self._started

    @property
    def current(self) -> TensorDictBase | None:
        """See :attr:`Path.current`: None; there is no TensorDict between two turns."""
        return None

    @current.setter
    def current(self, current: TensorDictBase | None) -> None:
        """Begin the conversations in progress again: after an error, a turn may have been taken in part."""
        self.cursor.start_over()

    def forget(self) -> None:
        """See :meth:`Path.forget`."""
        self.cursor.forget()

    def reset(self, **kwargs: Any) -> None:
        """See :meth:`Path.reset`; a conversation in which nothing was asked yet stays."""
        self._reset(range(len(self._dialogs.slots)))
        self._started = True
        if self._dialogs.are_over:
            raise EnvError(
                f"{type(self._conversations).__name__}: there is no prompt to begin a conversation with: the data is "
                "empty, or all its epochs are over. Pass more data, or more epochs."
            )

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """See :meth:`Path.reset_some`."""
        self._reset(marked.reshape(-1).nonzero().reshape(-1).tolist())

    def _reset(self, slots: Iterable[int]) -> None:
        found = {slot: self._dialogs.slots[slot] for slot in slots}
        stale = {slot: dialog for slot, dialog in found.items() if dialog is None or not dialog.is_untouched}
        self._exchange.cancel(stale.values())
        for dialog in stale.values():
            if dialog is not None:
                self._dialogs.drop(dialog)
        for slot in stale:
            self._dialogs.open(slot)

    def set_ids(self, ids: torch.Tensor) -> None:
        """See :meth:`Path.set_ids`."""
        for dialog, number in zip(self._dialogs.slots, ids.reshape(-1).tolist(), strict=True):
            if dialog is not None:
                dialog.id = number

    def replace_ids(self, ended: torch.Tensor) -> None:
        """See :meth:`Path.replace_ids`."""
        for slot in ended.reshape(-1).nonzero().reshape(-1).tolist():
            if (dialog := self._dialogs.slots[slot]) is not None:
                dialog.id = self._fresh_id()

    def _fresh_id(self) -> int:
        return int(self._ids.take(1)[0])

    def end_waits(self, in_s: float) -> None:
        """Wait no longer than ``in_s`` seconds from now on for answers, tools and rewards; called by any thread.

        What waits then raises :class:`WaitsEnded`, and its conversations count as not delivered.
        """
        self._exchange.end_waits(in_s)

    # A rollout ----------------------------------------------------------------------------------------

    def conform(self, outputs: TensorDictBase | None) -> None:
        """See :meth:`Path.conform`."""

    def begin(self, *, random: bool) -> None:
        """See :meth:`Path.begin`."""
        if random:
            raise NotNative("random actions are no answers of an engine")
        self._batch = []
        self.cursor.begin(self._dialogs.mark(self._batch, saves=self._saves))
        self._dialogs.fill()  # where that fails, the others go on

    def act(self, t: int) -> None:
        """See :meth:`Path.act`: answers to all prompts that a turn is to be taken of; of a stream, the next ones."""
        dialogs = self._dialogs
        if not self._streams:
            self._exchange.answer_all([dialog for dialog in dialogs.ready if not dialogs.row_of(dialog)])
        elif dialogs.lack_turns():
            self._exchange.stream()

    def step(self, t: int) -> None:
        """See :meth:`Path.step`: what follows the answers."""
        if self._streams:
            self._exchange.complete_one()
        else:
            self._exchange.complete_each()
        self._dialogs.fill()

    def record(self, t: int) -> None:
        """See :meth:`Path.record`."""
        self._batch.append([row.popleft() if row else None for row in self._dialogs.rows])

    def frame(self, t: int) -> TensorDictBase:
        """See :meth:`Path.frame`."""
        return self._records.frame(self._batch[t])

    def finish(self, steps: int) -> TensorDictBase:
        """See :meth:`Path.finish`."""
        times, self._batch = self._batch, []
        taken = [each for turns in times for each in turns if each is not None]
        self.frames_taken = len(taken)
        ended = {each.id: each.opening for each in taken if each.ended is not None}
        self.cursor.finish((each.opening for each in taken), ended)
        self._ended = [each.ended for each in taken if each.ended is not None]
        if self._resets:  # now, so that it shows whether the data is over
            self._reset(range(len(self._dialogs.slots)))
        batch = self._records.batch(times)
        return batch if self._storing is None else batch.to(self._storing)

    def ended(self) -> Sequence[tuple[float, int]]:
        """See :meth:`Path.ended`."""
        return self._ended

    # What its cursor asks of it -----------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """See :attr:`InProgress.is_over`."""
        return self._dialogs.are_over

    def begun(self) -> list[Opening]:
        """See :meth:`InProgress.begun`."""
        ahead = [each.opening for row in self._dialogs.rows for each in row]
        return ahead + [dialog.opening for dialog in self._dialogs.begun]

    def interrupt(self) -> list[Opening]:
        """See :meth:`InProgress.interrupt`."""
        self._exchange.cancel(self._dialogs)
        taken = [each.opening for turns in self._batch for each in turns if each is not None]
        found = [*taken, *self._dialogs.openings()]
        self._dialogs.clear()
        self._batch, self._started = [], False
        return found

    def go_back(self, mark: Mark, *, keeps: bool) -> list[Opening]:
        """See :meth:`InProgress.go_back`; turns that were taken since are taken again."""
        self._exchange.cancel(self._dialogs)
        return self._dialogs.go_back(mark)

    def look_ahead(self) -> None:
        """See :meth:`InProgress.look_ahead`."""
        if self._started:
            self._dialogs.fill()
        else:
            self._reset(range(len(self._dialogs.slots)))

    def save(self, *, waits: bool, alone: bool) -> Saved:
        """See :meth:`InProgress.save`."""
        if alone:
            return Saved({"dialogs": [], "rows": packed([[] for _ in self._dialogs.rows]), "row_ids": None})
        unsaved: list[str] = []
        if waits:
            try:
                self._exchange.follow_all()
            except Exception as error:  # of the environment; the next rollout raises it, if it is still there
                names = ", ".join(dialog.name for dialog in self._dialogs.waiting)
                unsaved.append(f"what follows the answer in {names} is lost, and it is asked again: {error}")
                self._exchange.cancel(self._dialogs)
                self.cursor.begin_again(self._dialogs.go_back(self._dialogs.mark([], saves=self._saves)))
        saved, ids = self._dialogs.save(waits=waits), self.row_ids()
        state = {**saved.state, "row_ids": None if ids is None else torch.from_numpy(ids)}
        return Saved(state, saved.lost, unsaved)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`InProgress.check_state`.

        Raises:
            ValueError: it was saved with another number of environments, or another ``async_envs``.
        """
        sizes = len(unpacked(state_dict["rows"])), len(self._dialogs.rows)
        if sizes[0] != sizes[1]:
            saved, own_rows = (
                "async_envs=True, or one environment" if number == 1 else f"{number} environments that take turns"
                for number in sizes
            )
            raise ValueError(
                f"state_dict: it was saved with {saved}, and this collector has {own_rows}. Make it with the same "
                "batch_size of the environment, and the same async_envs."
            )

    def load(
        self, state_dict: Mapping[str, Any], names: Names, done: Sequence[Origin], place: Callable[[], None]
    ) -> None:
        """See :meth:`InProgress.load`."""
        place()
        self._dialogs.load(state_dict, names)
        self._started = state_dict["row_ids"] is not None

    def row_ids(self) -> NDArray[Any] | None:
        """See :meth:`Path.row_ids`."""
        return self._dialogs.row_ids() if self._started else None

    def stats(self) -> dict[str, Any]:
        """See :meth:`Path.stats`."""
        return {**self.cursor.stats(), "turns_ahead": self._dialogs.num_ahead()}

    def close(self) -> None:
        """See :meth:`Path.close`."""
        self._exchange.cancel(self._dialogs)
