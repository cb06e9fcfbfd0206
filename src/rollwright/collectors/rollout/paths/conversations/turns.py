"""TurnPath: an engine answers, conversations follow, on messages and tokens; a TensorDict is made of each turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright.collectors.core import DataCursor, Path
from rollwright.collectors.rollout.paths.conversations import saving
from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog, EndedTurn
from rollwright.collectors.rollout.paths.conversations.division import divided, place_in
from rollwright.collectors.rollout.paths.conversations.exchange import Exchange
from rollwright.collectors.rollout.paths.conversations.records import RecordMaker
from rollwright.collectors.rollout.paths.conversations.rows import renamed
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.records import RecordLayout
from rollwright.envs.llm.core import Conversations, Opening
from rollwright.envs.llm.transforms import TurnHook
from rollwright.errors import EnvError, NotNative
from rollwright.modules.llm.engine import Engine

__all__ = ["TurnPath"]


class TurnPath(Path, DataCursor):
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
    offers_again = True

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
        self.how, self.cursor = dict(how), self
        self._conversations, self._find_hooks, self._streams = conversations, hooks, streams
        self._ids, self._storing = parts.ids, parts.devices.storing
        self._delivers_whole = whole = parts.options.delivers_whole
        self._saves = not (streams and whole)  # else nothing of a conversation in progress was taken
        self._resets = parts.options.reset_at_each_iter
        self._chain = TokenChain(
            engine.tokenizer,
            conversations.template,
            history=getattr(conversations, "history", "keep"),
            end_token_ids=engine.end_ids,
        ).new
        self._dialogs = Dialogs(conversations, self._chain, streams=streams, holds=whole, fresh_id=self._fresh_id)
        self._undelivered = self._dialogs.undelivered
        self._exchange = Exchange(conversations, engine, self._dialogs, hooks=hooks(), before_asking=self._keep_before)
        flat = parts.options.flatten_data and not whole  # else the delivery needs the rows
        self._records = RecordMaker(layout, parts.env.batch_size, flat=flat, streams=streams)
        self._batch: list[list[EndedTurn | None]] = []
        self._ended: list[tuple[float, int]] = []
        self._started = False
        self._mark: saving.Mark | None = None  # where the batch began, until it is delivered
        self._finished: list[Opening] = []  # of its turns, when it is complete

    def take_over(self, openings: Iterable[Opening], ended: Mapping[Any, Opening], num_dropped: int) -> None:
        """Begin with these conversations, which were drawn before; others have ended, and will be delivered."""
        self._undelivered.num_dropped += num_dropped
        self._undelivered.begin_again(openings)
        self._undelivered.load_ended({**self._undelivered.openings, **ended})

    def hand_over(self) -> tuple[list[Opening], dict[Any, Opening], int]:
        """Take out the conversations, for another path: to begin again; that have ended, by id; how many were dropped.

        Those that were delivered in part end here, on purpose, as with a reset: it is what looks for another path.
        """
        self._exchange.cancel(self._dialogs)
        again, cut = self._marked().begun_again(self._dialogs)
        ended = self._undelivered.openings if self._delivers_whole else {}
        self._undelivered.forget()
        self._undelivered.drop(cut)
        self._clear()
        return again, ended, self._undelivered.num_dropped

    def check(self) -> None:
        """See :meth:`Path.check`: transforms may have been added."""
        self._exchange.hooks = self._find_hooks()

    def _keep_before(self, dialog: Dialog) -> None:
        """Keep what is needed of a conversation whose turn may not be complete when the batch is."""
        ahead = self._streams or self._dialogs.row_of(dialog)
        keeps = ahead and dialog.number and self._saves
        dialog.before = saving.before_answer(dialog, self._conversations) if keeps else None

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
        self._exchange.cancel(self._dialogs)
        taken = [each.opening for times in self._batch for each in times if each is not None]
        self._undelivered.start_over([*taken, *self._dialogs.openings()], holds_ended=self._delivers_whole)
        self._clear()

    def go_back(self, *, keeps: bool = True) -> None:
        """See :meth:`Path.go_back`."""
        if self._mark is None:
            self.current = None
            return
        self._exchange.cancel(self._dialogs)
        taken = [each.opening for times in self._batch for each in times if each is not None]
        self._mark.go_back(self._dialogs, [*self._finished, *taken], self._chain)
        self._batch, self._finished = [], []

    def forget(self) -> None:
        """See :meth:`Path.forget`."""
        self._exchange.cancel(self._dialogs)
        self._undelivered.forget()
        self._clear()

    def _clear(self) -> None:
        self._conversations.clear()
        self._dialogs.clear()
        self._batch, self._mark = [], None
        self._started = False

    def reset(self, **kwargs: Any) -> None:
        """See :meth:`Path.reset`; a conversation in which nothing was asked yet stays."""
        self._reset(range(len(self._dialogs.slots)))
        self._started = True
        if self.is_over:
            raise EnvError(
                f"{type(self._conversations).__name__}: there is no prompt to begin a conversation with: the data is "
                "empty, or all its epochs are over. Pass more data, or more epochs."
            )

    def look_ahead(self) -> None:
        """See :meth:`DataCursor.look_ahead`."""
        if self._started:
            self._dialogs.fill()
        else:
            self._reset(range(len(self._dialogs.slots)))

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

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """See :attr:`DataCursor.is_over`."""
        return self._dialogs.are_over

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
        self._batch, self._finished = [], []
        self._mark = self._marked()
        self._dialogs.fill()  # where that fails, the others go on

    def _marked(self) -> saving.Mark:
        """Where conversations are."""
        in_parts = not self._delivers_whole
        return saving.Mark(self._dialogs, self._conversations, saves=self._saves, in_parts=in_parts)

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
        self.frames_taken, self._finished = len(taken), [each.opening for each in taken]
        self._undelivered.ended({each.id: each.opening for each in taken if each.ended is not None})
        self._ended = [each.ended for each in taken if each.ended is not None]
        if self._resets:  # now, so that it shows whether the data is over
            self._reset(range(len(self._dialogs.slots)))
        batch = self._records.batch(times)
        return batch if self._storing is None else batch.to(self._storing)

    def ended(self) -> Sequence[tuple[float, int]]:
        """See :meth:`Path.ended`."""
        return self._ended

    # Delivery and state ------------------------------------------------------------------------------

    def row_ids(self) -> NDArray[Any] | None:
        """See :meth:`Path.row_ids`."""
        return self._dialogs.row_ids() if self._started else None

    def delivered(self, ids: Iterable[int] | None = None) -> None:
        """See :meth:`DataCursor.delivered`."""
        self._mark = None
        self._undelivered.delivered(ids)

    def dropped(self) -> None:
        """See :meth:`DataCursor.dropped`."""
        self._undelivered.dropped()

    def load_undelivered(self, saved: torch.Tensor | None, held: Iterable[tuple[int, TensorDictBase]]) -> None:
        """See :meth:`DataCursor.load_undelivered`: they have the ids that the delivery gave them."""
        self._undelivered.load_ended(renamed(self._undelivered.openings, held))

    def state_dict(self) -> tuple[dict[str, Any], list[str]]:
        """See :meth:`Path.state_dict`; waits for tools and rewards that are in progress."""
        unsaved: list[str] = []
        try:
            self._exchange.follow_all()
        except Exception as error:  # of the environment; the next rollout raises it, if it is still there
            names = ", ".join(dialog.name for dialog in self._dialogs.waiting)
            unsaved.append(f"what follows the answer in {names} is lost, and it is asked again: {error}")
            self._exchange.cancel(self._dialogs)
            self._marked().go_back(self._dialogs, (), self._chain)
        dialogs: list[torch.Tensor] = []
        lost: list[Dialog] = []
        for dialog in self._dialogs:
            try:
                dialogs.append(saving.packed_dialog(dialog, self._conversations))
            except Exception as error:
                lost.append(dialog)
                if not dialog.is_untouched:
                    in_parts = not self._delivers_whole and bool(saving.delivered_in_parts(self._dialogs, [dialog]))
                    reason = f"{type(error).__name__}: {error}"
                    unsaved.append(saving.line_of_lost(dialog.name, in_parts=in_parts, reason=reason))
        return self._saved(dialogs, self._undelivered.state_dict(), lost), unsaved

    def _saved(
        self, dialogs: list[torch.Tensor], undelivered: Mapping[str, Any], lost: Collection[Dialog]
    ) -> dict[str, Any]:
        ids, source = self.row_ids(), self._conversations.source.state_dict()
        in_parts = not self._delivers_whole
        saved = saving.save(self._dialogs, dialogs, source, undelivered, lost=lost, in_parts=in_parts)
        return {**saved, "row_ids": None if ids is None else torch.from_numpy(ids)}

    def place(self, ids: Iterable[int] | None = ()) -> dict[str, Any]:
        """See :meth:`DataCursor.place`: of whole conversations, where the data is; of turns, all in progress, too."""
        done, left = self._undelivered.split(ids)
        also = [opening.draw.origin for opening in done]
        if self._delivers_whole:
            source = self._conversations.source.state_dict()
            return {**place_in(source, len(self._dialogs.rows), self._undelivered.num_dropped), "also": also}
        found = [(dialog, saving.latest(dialog, self._conversations)) for dialog in self._dialogs]
        known = [saved for _, saved in found if saved is not None]
        lost = [dialog for dialog, saved in found if saved is None]
        return {**self._saved(known, self._undelivered.state_dict(left), lost), "also": also}

    def divided(self, states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """See :meth:`DataCursor.divided`; whole conversations that were not delivered begin again."""
        sources = self._conversations.source.divided([state["source"] for state in states], count)
        num_rows, num_slots = len(self._dialogs.rows), len(self._dialogs.slots)
        if self._delivers_whole:
            dropped = [sum(state["dropped"] for state in states)] + [0] * (count - 1)
            return [place_in(source, num_rows, number) for source, number in zip(sources, dropped, strict=True)]
        return divided(states, sources, num_rows=num_rows, num_slots=num_slots)

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`Path.check_state`.

        Raises:
            ValueError: it was saved with another number of environments, or another ``async_envs``.
        """
        saving.check_rows(state_dict, self._dialogs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, ids_are_free: bool) -> None:
        """See :meth:`Path.load_state_dict`."""
        self.forget()
        fresh_id = None if ids_are_free else self._fresh_id
        saving.load(state_dict, self._dialogs, self._conversations, chain=self._chain, fresh_id=fresh_id)
        if state_dict["row_ids"] is not None:
            self._dialogs.vacate()
            self._dialogs.fill()
            self._started = True

    def stats(self) -> dict[str, Any]:
        """See :meth:`Path.stats`."""
        dialogs, undelivered = self._dialogs, self._undelivered
        ended = [each.opening for row in dialogs.rows for each in row]
        begun = [dialog.opening for dialog in dialogs.begun]
        left = [*undelivered.openings.values(), *undelivered.again, *ended, *begun]
        return {
            "conversations_in_progress": len(begun) + len(undelivered.again),
            "conversations_dropped": undelivered.num_dropped,
            "conversations_undelivered": len(undelivered),
            "conversations_unfinished": undelivered.names(left),
            "turns_ahead": dialogs.num_ahead(),
        }

    def close(self) -> None:
        """See :meth:`Path.close`."""
        self._exchange.cancel(self._dialogs)
