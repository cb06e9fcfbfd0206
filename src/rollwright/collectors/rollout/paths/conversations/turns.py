"""TurnPath: takes turns of conversations; and turns of an engine, on messages and tokens, and their records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.collectors.core import NothingLeft, Path
from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor
from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog, EndedTurn, Failures
from rollwright.collectors.rollout.paths.conversations.exchange import Exchange
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs, Times
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.data.layout import TRAJ_IDS
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.records import RecordLayout, empty_record, record
from rollwright.data.llm.trace import TraceWriter
from rollwright.envs.llm.core import Conversations, Opening
from rollwright.envs.llm.transforms import TurnHook
from rollwright.errors import EnvError, NotNative
from rollwright.modules.llm.engine import Engine


class TurnPath(Path):
    """Takes turns of conversations: the policy answers, the environment follows.

    One turn of each conversation in turn, ``[*env, T]``; with ``streams``, turns in the order in which they end,
    ``[N]``: conversations whose environment is ready generate while others step. A conversation whose outcome waits for
    others (a reward of a whole group) lets those others go ahead; their turns are kept for the next batch.

    Which tokens are sampled depends on prompt, epoch, repeat, turn and seed alone (:func:`turn_seed`), hence neither on
    the slot nor on the order.

    Args:
        parts: what it is made of.
        dialogs: the conversations.
        records: makes TensorDicts of their turns.
        how: for ``stats()``.
        hooks: finds what the environment's transforms do with a complete turn; an error where they cannot.
        calls_policy: whether the policy is called on TensorDicts; if not, its engine answers.
    """

    cursor: ConversationCursor

    def __init__(
        self,
        parts: PathParts,
        dialogs: Dialogs[Any],
        records: RecordMaker,
        *,
        how: Mapping[str, str],
        hooks: Callable[[], list[TurnHook]] = list,
        calls_policy: bool = False,
    ) -> None:
        self.how, self.calls_policy = dict(how), calls_policy
        self._dialogs, self._records, self._find_hooks = dialogs, records, hooks
        self._storing, self._resets = parts.devices.storing, parts.options.reset_at_each_iter
        self._dialogs.hooks = hooks()
        self._ended: list[tuple[float, int]] = []
        self.cursor = dialogs.cursor
        self.cursor.follow(dialogs)

    def check(self) -> None:
        """See :meth:`Path.check`: transforms may have been added."""
        self._dialogs.hooks = self._find_hooks()

    # The conversations --------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether there is a current TensorDict."""
        return self._dialogs.started

    @property
    def current(self) -> TensorDictBase | None:
        """See :attr:`Path.current`: None; there is no TensorDict between two turns."""
        return None

    @current.setter
    def current(self, current: TensorDictBase | None) -> None:
        """Begin the conversations in progress again: after an error, a turn may have been taken in part."""
        self.cursor.start_over()

    def forget(self) -> None:
        """Drop the current TensorDict for good: what it came from has changed."""
        self.cursor.forget()

    def reset(self, **kwargs: Any) -> None:
        """See :meth:`Path.reset`; a conversation in which nothing was asked yet stays."""
        self._dialogs.renew(range(len(self._dialogs.slots)))
        self._dialogs.started = True
        if self._dialogs.is_over:
            raise EnvError(
                f"{self._dialogs.kind}: there is no prompt to begin a conversation with: the data is "
                "empty, or all its epochs are over. Pass more data, or more epochs."
            )

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """Reset where ``marked``, bool ``[*env]``, says; the other environments go on."""
        self._dialogs.renew(marked.reshape(-1).nonzero().reshape(-1).tolist())

    def set_ids(self, ids: torch.Tensor) -> None:
        """Give each environment the id, int64 ``[*env]``, of the trajectory that it is in."""
        for dialog, number in zip(self._dialogs.slots, ids.reshape(-1).tolist(), strict=True):
            if dialog is not None:
                dialog.id = number

    def replace_ids(self, ended: torch.Tensor) -> None:
        """Give fresh ids where ``ended``, bool ``[*env]``, says."""
        for slot in ended.reshape(-1).nonzero().reshape(-1).tolist():
            if (dialog := self._dialogs.slots[slot]) is not None:
                dialog.id = self.cursor.fresh_id()

    def end_waits(self, in_s: float) -> None:
        """Wait no longer than ``in_s`` seconds from now on for answers, tools and rewards; called by any thread.

        What waits then raises :class:`WaitsEnded`, and its conversations count as not delivered.
        """
        self._dialogs.taker.end_waits(in_s)

    # A rollout ----------------------------------------------------------------------------------------

    def conform(self, outputs: TensorDictBase | None) -> None:
        """Give batches of random actions the entries that the policy writes, zero where no action is."""

    def begin(self, *, random: bool) -> None:
        """Open a batch, with random actions or with the policy's."""
        if random:
            raise NotNative("conversations take no random actions")
        self.cursor.begin(self._dialogs.mark())
        self._dialogs.fill()
        self._dialogs.raise_due()

    def act(self, t: int) -> None:
        """See :meth:`Path.act`: answers to all prompts that a turn is to be taken of; of a stream, the next ones."""
        self._dialogs.taker.act()

    def step(self, t: int) -> None:
        """See :meth:`Path.step`: what follows the answers."""
        self._dialogs.taker.step()
        self._dialogs.fill()
        self._dialogs.raise_due()

    @property
    def goes_on(self) -> bool:
        """Whether the next batch begins with what an error has left of the last one."""
        return self._dialogs.intact

    def record(self, t: int) -> None:
        """The frame goes into the batch's memory."""
        if any(self._dialogs.rows):
            self._dialogs.batch.append([row.popleft() if row else None for row in self._dialogs.rows])

    def frame(self, t: int) -> TensorDictBase:
        """The frame ``[*env]`` of time ``t``, which was recorded last, as the batch will hold it."""
        return self._records.frame(self._dialogs.batch[t])

    def finish(self, steps: int) -> TensorDictBase:
        """Close the batch after ``steps`` steps; times that were not taken are zero, their ids -1."""
        if not self._dialogs.batch:
            self._dialogs.raise_of_all(NothingLeft())
        times = self._dialogs.take_batch()
        taken = [each for turns in times for each in turns if each is not None]
        self.frames_taken = len(taken)
        ended = {each.id: each.opening for each in taken if each.ended is not None}
        self.cursor.finish((each.opening for each in taken), ended)
        self._ended = [each.ended for each in taken if each.ended is not None]
        if self._resets:  # now, so that it shows whether the data is over
            self._dialogs.renew(range(len(self._dialogs.slots)))
        batch = self._records.batch(times)
        return batch if self._storing is None else batch.to(self._storing)

    def ended(self) -> Sequence[tuple[float, int]]:
        """Returns and lengths of the trajectories that ended in the last batch; None: the batch shows them."""
        return self._ended

    # State --------------------------------------------------------------------------------------------

    def row_ids(self) -> NDArray[Any] | None:
        """See :meth:`Path.row_ids`."""
        return self._dialogs.row_ids() if self._dialogs.started else None

    def stats(self) -> dict[str, Any]:
        """What it adds to ``stats()`` of a collector."""
        ahead = {"turns_ahead": self._dialogs.num_ahead()}
        return {**self.cursor.stats(), **ahead, **self._dialogs.taker.stats()}

    def close(self) -> None:
        """End what is in progress."""
        self._dialogs.taker.close()
        if (trace := self.cursor.undelivered.trace) is not None:
            trace.close()


def turns_of_engine(
    parts: PathParts,
    conversations: Conversations,
    engine: Engine,
    *,
    hooks: Callable[[], list[TurnHook]],
    layout: RecordLayout,
) -> TurnPath:
    """A path whose answers an engine samples; messages and tokens are passed, and a TensorDict is made of each turn.

    Args:
        parts: what it is made of.
        conversations: of the environment.
        engine: of the policy.
        hooks: see :class:`TurnPath`.
        layout: of records.
    """
    options, cursor = parts.options, parts.cursor
    assert cursor is not None
    history: Any = getattr(conversations, "history", "keep")
    chain = TokenChain(engine.tokenizer, conversations.template, history=history, end_token_ids=engine.end_ids).new

    def make(slot: int, opening: Opening, number: int) -> Dialog:
        return Dialog(slot, opening, number, engine=engine, chain=chain())

    failures, most = Failures(options, lambda: cursor.undelivered.failed), options.most_in_progress
    if most is not None and options.groups_per_batch is not None:
        most *= getattr(conversations.source, "repeats", 1)
    streams, whole = options.in_stream, options.delivers_whole
    dialogs = Dialogs(conversations, make, streams=streams, whole=whole, cursor=cursor, failures=failures, most=most)
    dialogs.taker = Exchange(conversations, engine, dialogs, failures)
    if options.trace is not None:
        facts = {name: getattr(engine, name) for name in ("max_length", "vocab_size", "end_ids")}
        facts |= {"log_prob_mode": engine.sampling.log_prob_mode}
        cursor.undelivered.trace = TraceWriter(options.trace, facts, str(options.worker_idx or 0))
    flat = options.flatten_data and not whole  # else the delivery needs the rows
    records = RecordMaker(
        lambda each: record(each.turn, layout, each.id), parts.env.batch_size, flat=flat, streams=streams
    )
    how = {"env": "native: conversations, turn by turn", "policy": f"native: {type(engine).__name__}, on tokens"}
    return TurnPath(parts, dialogs, records, how=how, hooks=hooks)


def _stacked(records: list[TensorDictBase]) -> TensorDictBase:
    return cast(TensorDictBase, LazyStackedTensorDict(*records, stack_dim=0, stack_dim_name="time"))


class RecordMaker:
    """Makes TensorDicts of turns.

    Args:
        make: the record of a turn.
        batch_size: of the environment.
        flat: a batch is ``[N]``; False: ``[*env, T]``.
        streams: there is one row, and a frame is ``[]``.
        stack: a flat batch of its records.
    """

    def __init__(
        self,
        make: Callable[[EndedTurn], TensorDictBase],
        batch_size: Sequence[int] = (),
        *,
        flat: bool = True,
        streams: bool = True,
        stack: Callable[[list[TensorDictBase]], TensorDictBase] = _stacked,
    ) -> None:
        self._record, self._batch_size, self._stack = make, batch_size, stack
        self._flat, self._streams = flat or streams, streams

    def frame(self, turns: Sequence[EndedTurn | None]) -> TensorDictBase:
        """The turns of one time."""
        found = [self._record(each) for each in turns if each is not None]
        return found[0] if self._streams else cast(TensorDictBase, self._nested(found))

    def batch(self, times: Times) -> TensorDictBase:
        """The turns of a batch, by time and row; None: the row has none then."""
        made = [[None if each is None else self._record(each) for each in turns] for turns in times]
        if self._flat:
            records = [each for row in zip(*made, strict=True) for each in row if each is not None]
            return self._stack(records)
        steps = [self._nested(turns) for turns in _filled(made)]
        stacked: Any = LazyStackedTensorDict(*steps, stack_dim=len(self._batch_size), stack_dim_name="time")
        return cast(TensorDictBase, stacked)

    def _nested(self, rows: list[Any]) -> Any:
        """Records of one time as ``[*env]``."""
        for size in reversed(self._batch_size):
            rows = [LazyStackedTensorDict(*rows[i : i + size], stack_dim=0) for i in range(0, len(rows), size)]
        return rows[0]


def _filled(times: list[list[Any]]) -> list[list[Any]]:
    """Records by time and row, with an empty one of the id -1 where a row has none."""
    if all(each is not None for each in itertools.chain(*times)):
        return times
    blank = empty_record(next(each for each in itertools.chain(*times) if each is not None))
    blank.set(TRAJ_IDS, torch.tensor(-1, device="cpu"))
    return [[blank if each is None else each for each in turns] for turns in times]
