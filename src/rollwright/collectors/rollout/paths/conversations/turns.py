"""TurnPath: an engine answers, conversations follow, on messages and tokens; a TensorDict is made of each turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright.collectors.core import NothingLeft, Path
from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor
from rollwright.collectors.rollout.paths.conversations.exchange import Exchange
from rollwright.collectors.rollout.paths.conversations.failures import Failures
from rollwright.collectors.rollout.paths.conversations.records import RecordMaker
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.records import RecordLayout
from rollwright.data.llm.trace import TraceWriter
from rollwright.envs.llm.core import Conversations
from rollwright.envs.llm.transforms import TurnHook
from rollwright.errors import EnvError, NotNative
from rollwright.modules.llm.engine import Engine


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
        self._storing = parts.devices.storing
        whole = parts.options.delivers_whole
        self._resets = parts.options.reset_at_each_iter
        chain = TokenChain(
            engine.tokenizer,
            conversations.template,
            history=getattr(conversations, "history", "keep"),
            end_token_ids=engine.end_ids,
        ).new
        assert parts.cursor is not None
        self.cursor = parts.cursor
        failures = Failures(parts.options, lambda: self.cursor.undelivered.failed)
        most = parts.options.most_in_progress
        if most is not None and parts.options.groups_per_batch is not None:
            most *= getattr(conversations.source, "repeats", 1)
        self._dialogs = Dialogs(
            conversations, chain, engine, streams=streams, whole=whole, cursor=self.cursor, failures=failures, most=most
        )
        self._dialogs.hooks = hooks()
        if parts.options.trace is not None:
            facts = {name: getattr(engine, name) for name in ("max_length", "vocab_size", "end_ids")}
            facts |= {"log_prob_mode": engine.sampling.log_prob_mode}
            self.cursor.undelivered.trace = TraceWriter(parts.options.trace, facts, str(parts.options.worker_idx or 0))
        self._exchange = Exchange(conversations, engine, self._dialogs, failures)
        flat = parts.options.flatten_data and not whole  # else the delivery needs the rows
        self._records = RecordMaker(layout, parts.env.batch_size, flat=flat, streams=streams)
        self._ended: list[tuple[float, int]] = []
        self.cursor.follow(self._dialogs)

    def check(self) -> None:
        """See :meth:`Path.check`: transforms may have been added."""
        self._dialogs.hooks = self._find_hooks()

    # The conversations --------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """See :attr:`Path.started`."""
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
        """See :meth:`Path.forget`."""
        self.cursor.forget()

    def reset(self, **kwargs: Any) -> None:
        """See :meth:`Path.reset`; a conversation in which nothing was asked yet stays."""
        self._dialogs.renew(range(len(self._dialogs.slots)))
        self._dialogs.started = True
        if self._dialogs.is_over:
            raise EnvError(
                f"{type(self._conversations).__name__}: there is no prompt to begin a conversation with: the data is "
                "empty, or all its epochs are over. Pass more data, or more epochs."
            )

    def reset_some(self, marked: torch.Tensor, **kwargs: Any) -> None:
        """See :meth:`Path.reset_some`."""
        self._dialogs.renew(marked.reshape(-1).nonzero().reshape(-1).tolist())

    def set_ids(self, ids: torch.Tensor) -> None:
        """See :meth:`Path.set_ids`."""
        for dialog, number in zip(self._dialogs.slots, ids.reshape(-1).tolist(), strict=True):
            if dialog is not None:
                dialog.id = number

    def replace_ids(self, ended: torch.Tensor) -> None:
        """See :meth:`Path.replace_ids`."""
        for slot in ended.reshape(-1).nonzero().reshape(-1).tolist():
            if (dialog := self._dialogs.slots[slot]) is not None:
                dialog.id = self.cursor.fresh_id()

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
        self.cursor.begin(self._dialogs.mark())
        self._dialogs.fill()
        self._dialogs.raise_due()

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
        self._dialogs.raise_due()

    @property
    def goes_on(self) -> bool:
        """See :attr:`Path.goes_on`."""
        return self._dialogs.intact

    def record(self, t: int) -> None:
        """See :meth:`Path.record`."""
        if any(self._dialogs.rows):
            self._dialogs.batch.append([row.popleft() if row else None for row in self._dialogs.rows])

    def frame(self, t: int) -> TensorDictBase:
        """See :meth:`Path.frame`."""
        return self._records.frame(self._dialogs.batch[t])

    def finish(self, steps: int) -> TensorDictBase:
        """See :meth:`Path.finish`."""
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
        """See :meth:`Path.ended`."""
        return self._ended

    # State --------------------------------------------------------------------------------------------

    def row_ids(self) -> NDArray[Any] | None:
        """See :meth:`Path.row_ids`."""
        return self._dialogs.row_ids() if self._dialogs.started else None

    def stats(self) -> dict[str, Any]:
        """See :meth:`Path.stats`."""
        discarded = self._exchange.engine.tokens_discarded
        return {**self.cursor.stats(), "turns_ahead": self._dialogs.num_ahead(), "tokens_discarded": discarded}

    def close(self) -> None:
        """See :meth:`Path.close`."""
        self._exchange.cancel(self._dialogs)
        if (trace := self.cursor.undelivered.trace) is not None:
            trace.close()
