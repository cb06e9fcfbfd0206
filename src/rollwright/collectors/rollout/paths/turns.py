"""TurnPath: an engine answers, conversations follow, on messages and tokens; a TensorDict is made of each turn."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright.collectors.core import Path
from rollwright.collectors.rollout.paths.dialogs import Dialog, EndedTurn, own, packed, place_in, unpacked
from rollwright.collectors.rollout.paths.division import divided
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.collectors.rollout.paths.prompts import names_of, renamed
from rollwright.data.layout import TRAJ_IDS
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.records import RecordLayout, empty_record, record
from rollwright.data.llm.turns import FinishReason, Origin, turn_seed
from rollwright.envs.llm.core import Answer, Conversations, Opening, Outcome
from rollwright.envs.llm.transforms import TurnHook
from rollwright.errors import EnvError, NotNative, PolicyError, RollwrightError
from rollwright.modules.llm.engine import Completion, Engine, Request

__all__ = ["TurnPath", "WaitsEnded"]

_POLL_S = 0.002  # for answers, while tools and rewards are in progress
_WAIT_S = 0.5  # for anything, before it is looked at whether the wait is in vain


class WaitsEnded(RollwrightError):
    """The collector was shut down while answers, tools or rewards were waited for; the turns were not taken."""


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
        self._find_hooks, self._hooks = hooks, hooks()
        self._conversations, self._engine, self._layout, self._streams = conversations, engine, layout, streams
        self._ids, self._storing, self._batch_size = parts.ids, parts.devices.storing, parts.env.batch_size
        self._delivers_whole = parts.options.delivers_whole
        self._flat = parts.options.flatten_data and not self._delivers_whole  # else the delivery needs the rows
        self._resets = parts.options.reset_at_each_iter
        self._empty_chain = TokenChain(
            engine.tokenizer,
            conversations.template,
            history=getattr(conversations, "history", "keep"),
            end_token_ids=engine.end_ids,
        )
        self._dialogs: list[Dialog | None] = [None] * conversations.num_slots
        self._rows: list[deque[EndedTurn]] = [deque() for _ in range(1 if streams else conversations.num_slots)]
        self._asked: dict[int, Dialog] = {}  # by key of the request
        self._keys = itertools.count()
        self._again: deque[Opening] = deque()  # conversations that were interrupted by an error, to begin again
        self._vacant: set[int] = set()  # slots whose conversation has ended
        self._batch: list[list[EndedTurn | None]] = []
        self._ended: list[tuple[float, int]] = []
        self._undelivered: dict[int, Opening] = {}  # of conversations that ended in a batch, by trajectory id
        self._last_ended: list[int] = []
        self._started = self._data_is_over = False
        self._waits_until = math.inf  # on the clock of time.monotonic
        self.conversations_dropped = 0

    def check(self) -> None:
        """See :meth:`Path.check`: transforms may have been added."""
        self._hooks = self._find_hooks()

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
        self._cancel(self._dialogs)
        taken = [each for times in self._batch for each in times if each is not None]
        lost = {each.id: each.opening for each in (*taken, *itertools.chain(*self._rows))}
        if not self._delivers_whole:  # else those of earlier batches are held, and will be delivered
            lost = self._undelivered | lost
            self._undelivered = {}
        lost |= {dialog.id: dialog.opening for dialog in self._dialogs if dialog is not None}
        self._again.extend(lost.values())
        self._clear()

    def forget(self) -> None:
        """See :meth:`Path.forget`."""
        self._cancel(self._dialogs)
        self._again.clear()
        self._undelivered.clear()
        self._clear()

    def _clear(self) -> None:
        self._dialogs = [None] * len(self._dialogs)
        self._vacant.clear()
        for row in self._rows:
            row.clear()
        self._batch, self._last_ended = [], []
        self._started = self._data_is_over = False

    def _cancel(self, dialogs: Iterable[Dialog | None]) -> None:
        gone = {id(dialog) for dialog in dialogs if dialog is not None}
        keys = [key for key, dialog in self._asked.items() if id(dialog) in gone]
        if keys:
            self._engine.cancel(keys)
            for key in keys:
                del self._asked[key]

    def reset(self, **kwargs: Any) -> None:
        """See :meth:`Path.reset`; a conversation in which nothing was asked yet stays."""
        self._reset(range(len(self._dialogs)))
        self._started = True
        if self.is_over:
            raise EnvError(
                f"{type(self._conversations).__name__}: there is no prompt to begin a conversation with: the data is "
                "empty, or all its epochs are over. Pass more data, or more epochs."
            )

    def look_ahead(self) -> None:
        """See :meth:`Path.look_ahead`."""
        if not self._started:
            self._reset(range(len(self._dialogs)))

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """See :meth:`Path.reset_some`."""
        self._reset(marked.reshape(-1).nonzero().reshape(-1).tolist())

    def _reset(self, slots: Iterable[int]) -> None:
        stale = [slot for slot in slots if (dialog := self._dialogs[slot]) is None or not dialog.is_untouched]
        dropped = [self._dialogs[slot] for slot in stale]
        self._cancel(dropped)
        for dialog in dropped:
            if dialog is not None:
                self._drop(dialog)
        for slot in stale:
            self._open(slot)

    def _drop(self, dialog: Dialog) -> None:
        """A conversation ends here, on purpose: its prompt counts as done."""
        gone = {dialog.id: dialog.opening}
        if not self._streams:
            gone |= {each.id: each.opening for each in self._rows[dialog.slot]}
            self._rows[dialog.slot].clear()
        for opening in gone.values():
            self._conversations.source.delivered(opening.draw.origin)
        self.conversations_dropped += len(gone)

    def _open(self, slot: int) -> None:
        """Begin the next conversation."""
        self._dialogs[slot] = None
        try:
            if self._again:
                opening = self._again.popleft()
                self._conversations.load(slot, opening, opening.messages, {})
            else:
                opening = self._conversations.open(slot)
        except StopIteration:
            self._data_is_over = True
            return
        try:
            self._dialogs[slot] = Dialog.begun(slot, opening, self._empty_chain.new())
        except ValueError as error:
            raise ValueError(f"{_place(opening.draw.origin, 0)}: {error}") from error

    @property
    def is_over(self) -> bool:
        """See :attr:`Path.is_over`."""
        if not self._data_is_over or any(self._rows):
            return False
        return all(dialog is None for dialog in self._dialogs)

    def set_ids(self, ids: torch.Tensor) -> None:
        """See :meth:`Path.set_ids`."""
        for dialog, number in zip(self._dialogs, ids.reshape(-1).tolist(), strict=True):
            if dialog is not None:
                dialog.id = number

    def replace_ids(self, ended: torch.Tensor) -> None:
        """See :meth:`Path.replace_ids`."""
        for slot in ended.reshape(-1).nonzero().reshape(-1).tolist():
            if (dialog := self._dialogs[slot]) is not None:
                dialog.id = self._fresh_id()

    def _fresh_id(self) -> int:
        return int(self._ids.take(1)[0])

    # Turns --------------------------------------------------------------------------------------

    def _ask(self, dialogs: Sequence[Dialog]) -> None:
        """Ask the engine for answers."""
        if not dialogs:
            return
        requests = []
        for dialog in dialogs:
            if self.keeps_place and not self._delivers_whole and (self._streams or self._rows[dialog.slot]):
                dialog.before = self._packed_or_none(dialog)  # it may be asked for before the turn is complete
            key = next(self._keys)
            self._asked[key] = dialog
            dialog.asked = True
            prompt = dialog.chain.tokens
            requests.append(Request(key, prompt, turn_seed(dialog.opening.draw.origin, dialog.number)))
        try:
            self._engine.submit(requests)
        except ValueError as error:
            self._explain(requests, error)

    def _explain(self, requests: Sequence[Request], error: ValueError) -> None:
        """Raise the error of the first request that is refused alone, with the name of its conversation."""
        for request in requests:
            try:
                self._engine.submit([request])
            except ValueError as found:
                raise ValueError(f"{_name(self._asked.pop(cast(int, request.key)))}: {found}") from found
        raise error

    def _answers(self, timeout: float) -> dict[int, Answer]:
        """Answers that have come, by slot; waits until there is one."""
        found = {}
        for completion in self._engine.results(timeout):
            dialog = self._asked.pop(cast(int, completion.key), None)
            if dialog is not None:  # else it was dropped meanwhile
                found[dialog.slot] = self._answer(dialog, completion)
        return found

    def _answer(self, dialog: Dialog, found: Completion) -> Answer:
        if found.finish_reason is FinishReason.ERROR:
            raise PolicyError(f"policy: the engine failed in {_name(dialog)}: {found.error}") from found.error
        return dialog.answer(found, self._engine)

    def _follow(self, timeout: float | None) -> bool:
        """Take outcomes that have come; returns whether there were any."""
        outcomes = self._outcomes() if timeout is None else self._conversations.outcomes(timeout)
        for slot, outcome in outcomes.items():
            dialog = self._dialogs[slot]
            assert dialog is not None
            try:
                ended = dialog.follow(outcome, self._engine.max_length, partial(self._conversations.cut, slot))
            except ValueError as error:  # of messages that cannot be written as tokens
                raise EnvError(f"{_name(dialog)}: {error}") from error
            if ended is not None:
                for hook in self._hooks:
                    hook(ended.turn, dialog.memory)
                self._keep(dialog, ended)
        return bool(outcomes)

    def _outcomes(self) -> dict[int, Outcome]:
        """Outcomes that have come; waits until there is one, or none is to come."""
        while True:
            self._check_waits()
            until = time.monotonic() + _WAIT_S
            outcomes = self._conversations.outcomes(_WAIT_S)
            if outcomes or time.monotonic() < until:
                return outcomes

    def end_waits(self, in_s: float) -> None:
        """Wait no longer than ``in_s`` seconds from now on for answers, tools and rewards; called by any thread.

        What waits then raises :class:`WaitsEnded`, and its conversations count as not delivered.
        """
        self._waits_until = time.monotonic() + in_s

    def _check_waits(self) -> None:
        if time.monotonic() > self._waits_until:
            begun = ", ".join(
                _name(dialog) for dialog in self._dialogs if dialog is not None and not dialog.is_untouched
            )
            raise WaitsEnded(
                f"shutdown: answers, tools or rewards were still to come in {begun}; they are not delivered."
            )

    def _keep(self, dialog: Dialog, ended: EndedTurn) -> None:
        row = self._rows[0 if self._streams else dialog.slot]
        if self._streams and self._delivers_whole:
            dialog.held.append(ended)
            if ended.ended is not None:
                row.extend(dialog.held)
        else:
            row.append(ended)
        if ended.ended is not None:
            self._dialogs[dialog.slot] = None
            self._vacant.add(dialog.slot)

    def _fill(self) -> None:
        """Begin conversations where others have ended, in order of slots, whichever of them ended first."""
        for slot in sorted(self._vacant):
            self._open(slot)
            if (dialog := self._dialogs[slot]) is not None:
                dialog.id = self._fresh_id()
        self._vacant.clear()

    @property
    def _ready(self) -> list[Dialog]:
        """Conversations whose prompt waits to be answered."""
        return [dialog for dialog in self._dialogs if dialog is not None and dialog.is_ready]

    @property
    def _waits(self) -> bool:
        """Whether something is to follow an answer."""
        return any(dialog is not None and dialog.pending is not None for dialog in self._dialogs)

    def _lacks_turns(self) -> bool:
        """Whether a row of the batch has no turn to take that another one will come for."""
        if self._streams:
            return not self._rows[0] and any(dialog is not None for dialog in self._dialogs)
        return any(not row and dialog is not None for row, dialog in zip(self._rows, self._dialogs, strict=True))

    # A rollout ----------------------------------------------------------------------------------------

    def conform(self, outputs: TensorDictBase | None) -> None:
        """See :meth:`Path.conform`."""

    def begin(self, *, random: bool) -> None:
        """See :meth:`Path.begin`."""
        if random:
            raise NotNative("random actions are no answers of an engine")
        self._batch = []

    def act(self, t: int) -> None:
        """See :meth:`Path.act`: answers to all prompts that a turn is to be taken of; of a stream, the next ones."""
        if self._streams:
            if self._lacks_turns():
                self._stream()
        else:
            self._answer_all([dialog for dialog in self._ready if not self._rows[dialog.slot]])

    def step(self, t: int) -> None:
        """See :meth:`Path.step`: what follows the answers."""
        while self._lacks_turns():
            if self._streams:
                came = self._waits and self._follow(0.0 if self._asked else None)
                self._fill()
                if self._lacks_turns() and not self._stream() and not came and not self._asked:
                    raise EnvError(self._stuck())
            elif not self._follow(None):  # they wait for others: let those go ahead
                self._fill()
                if not (ready := self._ready):
                    raise EnvError(self._stuck())
                self._answer_all(ready)
        self._fill()

    def _answer_all(self, dialogs: Sequence[Dialog]) -> None:
        """Hand answers to the environment, when all have come."""
        self._ask(dialogs)
        answers: dict[int, Answer] = {}
        while self._asked:
            self._check_waits()
            answers |= self._answers(_WAIT_S)
        if answers:
            self._conversations.submit({slot: answers[slot] for slot in sorted(answers)})

    def _stream(self) -> bool:
        """Ask for answers to all prompts, and hand those that come first to the environment; whether any came."""
        self._ask(self._ready)
        answers: dict[int, Answer] = {}
        while self._asked and not answers:
            self._check_waits()
            waits = self._waits
            answers = self._answers(_POLL_S if waits else _WAIT_S)
            if waits:
                break
        if answers:
            self._conversations.submit(answers)
        return bool(answers)

    def _stuck(self) -> str:
        waiting = [dialog for dialog in self._dialogs if dialog is not None and dialog.pending is not None]
        return (
            f"{type(self._conversations).__name__}: nothing follows the answers in {', '.join(map(_name, waiting))}, "
            "and no other conversation goes on that they could wait for. Use as many environments as a group has "
            "conversations, or more, where a reward is of a whole group."
        )

    def record(self, t: int) -> None:
        """See :meth:`Path.record`."""
        self._batch.append([row.popleft() if row else None for row in self._rows])

    def frame(self, t: int) -> TensorDictBase:
        """See :meth:`Path.frame`."""
        found = [self._record(each) for each in self._batch[t] if each is not None]
        return found[0] if self._streams else _nested(found, self._batch_size)

    def _record(self, ended: EndedTurn) -> TensorDict:
        return record(ended.turn, self._layout, ended.id)

    def finish(self, steps: int) -> TensorDictBase:
        """See :meth:`Path.finish`."""
        rows = list(zip(*self._batch, strict=True))
        taken = [each for row in rows for each in row if each is not None]
        ended = [each for times in self._batch for each in times if each is not None and each.ended is not None]
        self._batch = []
        self.frames_taken = len(taken)
        self._undelivered |= {each.id: each.opening for each in ended}
        self._last_ended = [each.id for each in ended]
        self._ended = [each.ended for each in ended if each.ended is not None]
        if self._resets:  # now, so that it shows whether the data is over
            self._reset(range(len(self._dialogs)))
        if self._flat or self._streams:
            records = [self._record(each) for each in taken]
            batch: Any = LazyStackedTensorDict(*records, stack_dim=0, stack_dim_name="time")
        else:
            batch = self._stacked([[None if each is None else self._record(each) for each in row] for row in rows])
        return cast(TensorDictBase, batch if self._storing is None else batch.to(self._storing))

    def _stacked(self, rows: list[list[TensorDict | None]]) -> TensorDictBase:
        """``[*env, T]`` of records by row; what was not taken is blank."""
        times = list(zip(*rows, strict=True))
        if any(made is None for made in itertools.chain(*times)):
            blank = empty_record(next(made for made in itertools.chain(*times) if made is not None))
            blank.set(TRAJ_IDS, torch.tensor(-1))
            times = [tuple(blank if made is None else made for made in each) for each in times]
        steps = [_nested(list(each), self._batch_size) for each in times]
        return cast(
            TensorDictBase, LazyStackedTensorDict(*steps, stack_dim=len(self._batch_size), stack_dim_name="time")
        )

    def ended(self) -> Sequence[tuple[float, int]]:
        """See :meth:`Path.ended`."""
        return self._ended

    # Delivery and state ------------------------------------------------------------------------------

    def row_ids(self) -> NDArray[Any] | None:
        """See :meth:`Path.row_ids`."""
        if not self._started:
            return None
        if self._streams:
            return np.asarray([self._rows[0][0].id if self._rows[0] else -1], np.int64)
        return np.asarray([self._row_id(slot) for slot in range(len(self._dialogs))], np.int64)

    def _row_id(self, slot: int) -> int:
        row, dialog = self._rows[slot], self._dialogs[slot]
        if row:
            return row[0].id
        return -1 if dialog is None or dialog.is_untouched else dialog.id

    def delivered(self, ids: Iterable[int] | None = None) -> None:
        """See :meth:`Path.delivered`."""
        for number in self._last_ended if ids is None else ids:
            opening = self._undelivered.pop(number, None)
            if opening is not None:
                self._conversations.source.delivered(opening.draw.origin)

    def lost(self, ids: Iterable[int]) -> None:
        """See :meth:`Path.lost`."""
        self._again.extend(self._undelivered.pop(number) for number in ids if number in self._undelivered)

    def load_undelivered(self, saved: torch.Tensor | None, held: Iterable[tuple[int, TensorDictBase]]) -> None:
        """See :meth:`Path.load_undelivered`: they have the ids that the delivery gave them."""
        self._undelivered = renamed(self._undelivered, held)

    def dropped(self) -> None:
        """See :meth:`Path.dropped`."""
        self.conversations_dropped += len(self._undelivered)
        self.delivered(list(self._undelivered))

    def state_dict(self) -> tuple[dict[str, Any], list[str]]:
        """See :meth:`Path.state_dict`; waits for tools and rewards that are in progress."""
        while self._waits and self._follow(None):
            pass
        unsaved: list[str] = []
        dialogs = []
        for dialog in self._dialogs:
            if dialog is None:
                continue
            try:
                dialogs.append(self._packed(dialog))
            except Exception as error:
                if not dialog.is_untouched:
                    unsaved.append(f"{_name(dialog)} begins again: {type(error).__name__}: {error}")
        return self._saved(dialogs, self._undelivered), unsaved

    def _saved(self, dialogs: list[torch.Tensor], undelivered: Mapping[int, Opening]) -> dict[str, Any]:
        ids = self.row_ids()
        return {
            "source": self._conversations.source.state_dict(),
            "dialogs": dialogs,
            "rows": packed([[own(each) for each in row] for row in self._rows]),
            "row_ids": None if ids is None else torch.from_numpy(ids),
            "undelivered": packed(undelivered),
            "again": packed(list(self._again)),
            "dropped": self.conversations_dropped,
        }

    def place(self, ids: Iterable[int] | None = ()) -> dict[str, Any]:
        """See :meth:`Path.place`: of whole conversations, the place in the data; of turns, what is in progress, too."""
        done = set(self._last_ended if ids is None else ids)
        also = [opening.draw.origin for number, opening in self._undelivered.items() if number in done]
        if self._delivers_whole:
            source = self._conversations.source.state_dict()
            return {**place_in(source, len(self._rows)), "also": also, "dropped": self.conversations_dropped}
        dialogs = [self._latest(dialog) for dialog in self._dialogs if dialog is not None]
        left = {number: opening for number, opening in self._undelivered.items() if number not in done}
        return {**self._saved([saved for saved in dialogs if saved is not None], left), "also": also}

    def divided(self, states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """See :meth:`Path.divided`; whole conversations that were not delivered begin again."""
        sources = self._conversations.source.divided([state["source"] for state in states], count)
        if self._delivers_whole:
            return [place_in(source, len(self._rows)) for source in sources]
        return divided(states, sources, num_rows=len(self._rows), num_slots=len(self._dialogs))

    def _latest(self, dialog: Dialog) -> torch.Tensor | None:
        """A conversation, without a wait for what follows its last answer; None: it can only begin again."""
        if dialog.asked or dialog.pending is not None:
            return dialog.before
        return self._packed_or_none(dialog)

    def _packed_or_none(self, dialog: Dialog) -> torch.Tensor | None:
        try:
            return self._packed(dialog)
        except Exception:  # the environment may fail in any way
            return None

    def _packed(self, dialog: Dialog) -> torch.Tensor:
        conversations, slot = self._conversations, dialog.slot
        of_environment = conversations.state(slot) if dialog.pending is None else conversations.ended_state(slot)
        return packed(dialog.state_dict(of_environment))

    def load_state_dict(self, state_dict: Mapping[str, Any], *, ids_are_free: bool) -> None:
        """See :meth:`Path.load_state_dict`.

        Raises:
            ValueError: it was saved with another number of environments, or another ``async_envs``.
        """
        saved_rows = unpacked(state_dict["rows"])
        if len(saved_rows) != len(self._rows):
            saved, own_rows = (
                "async_envs=True, or one environment" if number == 1 else f"{number} environments that take turns"
                for number in (len(saved_rows), len(self._rows))
            )
            raise ValueError(
                f"state_dict: it was saved with {saved}, and this collector has {own_rows}. Make it with the same "
                "batch_size of the environment, and the same async_envs."
            )
        self.forget()
        source = self._conversations.source
        source.load_state_dict(state_dict["source"])
        if also := state_dict.get("also"):
            for origin in also:
                source.delivered(origin)
            source.load_state_dict(source.state_dict())  # groups are as large as what is left of them
        names = _Names(None if ids_are_free else self._fresh_id)
        for row, turns in zip(self._rows, saved_rows, strict=True):
            row.extend(replace(each, id=names.of(each.id)) for each in turns)
        self._undelivered = {names.of(number): at for number, at in unpacked(state_dict["undelivered"]).items()}
        self._again.extend(unpacked(state_dict["again"]))
        dialogs = [saved for saved in map(unpacked, state_dict["dialogs"]) if saved["slot"] < len(self._dialogs)]
        ended = [each.opening for row in self._rows for each in row if each.ended is not None]
        going_on = [saved["opening"] for saved in dialogs]
        for opening in (*ended, *self._undelivered.values(), *self._again, *going_on):
            source.claim(opening.draw.origin)
        for saved in dialogs:
            dialog = Dialog.loaded(saved, self._empty_chain.new())
            dialog.id = names.of(dialog.id)
            dialog.held = [replace(each, id=dialog.id) for each in dialog.held]
            self._dialogs[dialog.slot] = dialog
            self._conversations.load(dialog.slot, dialog.opening, dialog.messages, saved["environment"])
        self.conversations_dropped = int(state_dict["dropped"])
        if state_dict["row_ids"] is not None:
            self._vacant.update(slot for slot, dialog in enumerate(self._dialogs) if dialog is None)
            self._fill()
            self._started = True

    def stats(self) -> dict[str, Any]:
        """See :meth:`Path.stats`."""
        begun = [dialog for dialog in self._dialogs if dialog is not None and not dialog.is_untouched]
        ended = [each.opening for row in self._rows for each in row]
        left = [*self._undelivered.values(), *ended, *(dialog.opening for dialog in begun)]
        ahead = sum(len(row) for row in self._rows) + sum(len(dialog.held) for dialog in begun)
        return {
            "conversations_in_progress": len(begun) + len(self._again),
            "conversations_dropped": self.conversations_dropped,
            "conversations_undelivered": len(self._undelivered),
            "conversations_unfinished": names_of(left),
            "turns_ahead": ahead,
        }

    def close(self) -> None:
        """See :meth:`Path.close`."""
        self._cancel(self._dialogs)


class _Names:
    """New ids for saved ones, each the same wherever it stands; or the saved ones."""

    def __init__(self, fresh: Any) -> None:
        self._fresh, self._known = fresh, {-1: -1}

    def of(self, number: int) -> int:
        if self._fresh is None:
            return number
        if number not in self._known:
            self._known[number] = self._fresh()
        return self._known[number]


def _nested(rows: list[Any], batch_size: Sequence[int]) -> Any:
    """Records of one time as ``[*env]``."""
    for size in reversed(batch_size):
        rows = [LazyStackedTensorDict(*rows[i : i + size], stack_dim=0) for i in range(0, len(rows), size)]
    return rows[0]


def _name(dialog: Dialog) -> str:
    return _place(dialog.opening.draw.origin, dialog.number)


def _place(origin: Origin, number: int) -> str:
    where = f"epoch {origin.epoch}, repeat {origin.repeat}"
    return f"the conversation of prompt {origin.index} ({where}), turn {number}"
