"""A pool of environments of one conversation each, whose turns are TensorDicts, for :class:`TurnPath`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor
from rollwright.collectors.rollout.paths.conversations.dialogs import EndedTurn, Failures, InSlot
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs
from rollwright.collectors.rollout.paths.conversations.turns import RecordMaker, TurnPath
from rollwright.collectors.rollout.paths.parts import PathParts
from rollwright.collectors.rollout.paths.pool import PoolSteps, Stepped
from rollwright.collectors.rollout.paths.stages import IDS
from rollwright.collectors.rollout.state import td_from, td_state
from rollwright.data.layout import stack_frames
from rollwright.data.llm.records import origins_in
from rollwright.data.llm.turns import FinishReason, Message, Origin
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.core import ConversationSlots, DataPlace, Opening, PromptDraw
from rollwright.envs.llm.slot_row import Name
from rollwright.envs.llm.undelivered import Undelivered
from rollwright.errors import EnvError
from rollwright.modules.signature import Call

_MANY = 16  # notes that an environment is sent without a need


def is_pool_of_conversations(env: AsyncEnvPool) -> bool:
    """Whether each environment of a pool is one of a single conversation (``LLMEnv``), with transforms or not."""
    return env.ndim == 2 and env.batch_size[1] == 1 and hasattr(env, "begin_conversation")


class PooledConversations(ConversationSlots, DataPlace):
    """The conversations of a pool, one in each environment, and the data of all of them.

    Each environment has its own data, in whatever process it is, and begins the next conversation when one has ended.
    The group of a conversation is that of its environment, times the number of environments, plus the index of the
    environment. An environment is told what became of its conversations before it begins another one.

    Args:
        env: the pool.

    Attributes:
        roots: what the next steps are taken from, ``[]``, by index of the environment.
    """

    def __init__(self, env: AsyncEnvPool) -> None:
        self._env, self.num_slots, self.source = env, env.num_envs, self
        self.roots: dict[int, TensorDictBase] = {}
        self._next: set[int] = set()  # environments that have begun a conversation which nobody asked for
        self._done: list[list[Name]] = [[] for _ in range(self.num_slots)]  # delivered, which it was not told yet
        self._claimed: list[list[Name]] = [[] for _ in range(self.num_slots)]
        self._places: dict[int, dict[str, Any]] = {}  # in the data, when they were looked at last

    # Conversations ------------------------------------------------------------------------------------

    def open(self, slot: int) -> Opening:
        """Begin a conversation in a slot; one that was in progress there is dropped."""
        if slot in self._next:
            self._next.discard(slot)
        elif self._begin(slot):
            self._reset(slot)
        else:
            raise StopIteration
        return self.opening_of(slot, self.roots[slot])

    def takes(self, slot: int, opening: Opening) -> bool:
        """See :meth:`ConversationSlots.takes`: in its own environment."""
        return self._slot_of(opening.draw.origin) == slot

    def load(self, slot: int, opening: Opening, messages: Sequence[Message], state: Mapping[str, Any]) -> None:
        """Go on with a conversation that was saved; an empty ``state``: begin it again."""
        if not state:
            self._begin(slot, _name(opening.draw.origin, self.num_slots))
            self._reset(slot)
            return
        self._take_out(slot)
        self._env.call(slot, "load_conversation", state["progress"])
        root = td_from(state["root"])
        assert root is not None
        self.roots[slot] = root

    def _begin(self, slot: int, name: Name | None = None) -> bool:
        """Have an environment begin its next conversation, or the one that is named; whether there is any."""
        self._take_out(slot)
        return bool(self._env.call(slot, "begin_conversation", name))

    def _reset(self, slot: int) -> None:
        """Take the first prompt of the conversation that was begun."""
        self._env.async_reset_send(env_index=[slot])
        self.roots[slot] = self._env.async_reset_recv(env_index=[slot])[0][0]

    def _take_out(self, slot: int) -> None:
        """Tell an environment what came of its conversations, and take the one that is there out."""
        self.tell(slot)
        self._env.call(slot, "take_out", slot in self._next)
        self._next.discard(slot)
        self.roots.pop(slot, None)

    def clear(self) -> None:
        """Take the conversations out of all slots, for others to be begun or loaded; their groups lack none of them."""
        for slot in range(self.num_slots):
            self._take_out(slot)

    def tell(self, slot: int, least: int = 1) -> None:
        """Tell an environment what was delivered of its conversations, if that is as much as ``least``."""
        if len(self._done[slot]) + len(self._claimed[slot]) >= least:
            self._env.call(slot, "note", self._done[slot], self._claimed[slot])
            self._done[slot], self._claimed[slot] = [], []

    def stepped(self, slot: int, root: TensorDictBase, ended: Opening | None) -> None:
        """A step has ended.

        Args:
            slot: of the environment.
            root: what the next one is taken from.
            ended: the conversation, if it has ended with that; where the root is its own, there is no other one.
        """
        if ended is not None and self.opening_of(slot, root) == ended:
            return
        self.roots[slot] = root
        if ended is not None:
            self._next.add(slot)

    def opening_of(self, slot: int, root: TensorDictBase) -> Opening:
        """The conversation that a root of an environment is of."""
        [origin] = origins_in(root)
        return Opening(PromptDraw(replace(origin, group=origin.group * self.num_slots + slot), {}))

    def state(self, slot: int) -> dict[str, Any]:
        """What the conversation of a slot needs to go on, beside its messages; between outcome and answer."""
        self.tell(slot)
        self._places[slot], progress, reason = self._env.call(slot, "save_conversation")
        if reason is not None:
            raise EnvError(reason)
        return {"progress": progress, "root": td_state(self.roots[slot])}

    # The data -----------------------------------------------------------------------------------------

    def _slot_of(self, origin: Origin) -> int:
        return origin.group % self.num_slots

    def delivered(self, origin: Origin) -> None:
        """The conversation from ``origin`` has reached the consumer, whole; or it was dropped on purpose."""
        self._done[self._slot_of(origin)].append(_name(origin, self.num_slots))

    def claim(self, origin: Origin) -> None:
        """The conversation from ``origin`` was saved and goes on: it is not drawn again; after a load."""
        self._claimed[self._slot_of(origin)].append(_name(origin, self.num_slots))

    def group_size(self, origin: Origin) -> int:
        """Conversations of the group of ``origin`` that were not delivered before the last load."""
        sizes: list[int] = self._env.repeats
        return sizes[self._slot_of(origin)]

    def divided(self, states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """Places of ``count`` parts of the data, behind all that was delivered of the parts that it had before."""
        raise ValueError("what is in progress belongs to the environment of one worker.")

    def look(self, slot: int) -> None:
        """Note the place of an environment in its data, before it is busy."""
        self.tell(slot)
        self._places[slot] = self._env.call(slot, "save_place")

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`DataPlace.state_dict`; that of an environment which is busy is as it was before."""
        for slot in {*range(self.num_slots)}.difference(self._env.busy):
            self.look(slot)
        places = [packed(self._places[slot]) for slot in range(self.num_slots)]
        return {"envs": places, "done": [list(map(list, names)) for names in self._done]}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`DataPlace.check_state`.

        Raises:
            ValueError: it was saved with another number of environments, or of another environment.
        """
        if (count := len(state_dict.get("envs", ()))) != self.num_slots:
            raise ValueError(
                f"state_dict: expected that of a pool of {self.num_slots} environments, got one of {count}. Make the "
                "pool as the one that was saved."
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a place in the data."""
        self.check_state(state_dict)
        for slot, (place, done) in enumerate(zip(state_dict["envs"], state_dict["done"], strict=True)):
            self._env.call(slot, "load_place", unpacked(place))
            self._done[slot], self._claimed[slot] = [(group, repeat) for group, repeat in done], []


def _name(origin: Origin, count: int) -> Name:
    """The name that its environment has for a conversation."""
    return origin.group // count, origin.repeat


@dataclass(slots=True)
class PooledTurn:
    """A turn of a pool.

    Attributes:
        td: its record.
        number: within the conversation.
        origin: of the conversation.
        done: whether it is the last one.
    """

    td: TensorDictBase
    number: int
    origin: Origin
    done: bool
    finish_reason: FinishReason = FinishReason.STOP
    extras: dict[str, Any] = field(default_factory=dict)


class PoolExchange:
    """Has a policy act where environments of a pool are ready, and hands complete turns to the row.

    Args:
        conversations: of the pool.
        steps: acts, and takes steps.
        dialogs: the conversations.
    """

    def __init__(self, conversations: PooledConversations, steps: PoolSteps, dialogs: Dialogs[InSlot]) -> None:
        self._conversations, self._steps, self._dialogs = conversations, steps, dialogs

    def act(self) -> None:
        """See :meth:`TurnTaker.act`: the policy acts on all environments that are ready."""
        dialogs, conversations = self._dialogs, self._conversations
        for dialog in list(dialogs):
            if dialog.asked and dialog.slot not in self._steps.env.busy:  # its step was lost
                dialogs.begin_again(dialog)
        dialogs.fill()
        if not dialogs.lack_turns() or not (ready := dialogs.ready):
            return
        for dialog in ready:
            conversations.tell(dialog.slot, _MANY)
            dialogs.keep_before(dialog)
            if dialogs.cursor.keeps_place and dialog.before is None:
                conversations.look(dialog.slot)
        roots = {dialog.slot: conversations.roots[dialog.slot] for dialog in ready}
        try:
            self._steps.send(roots, {dialog.slot: dialog.id for dialog in ready})
        except Exception as error:
            dialogs.raise_of_all(error)
        finally:
            busy = self._steps.env.busy
            for dialog in ready:
                dialog.asked = dialog.slot in busy

    def step(self) -> None:
        """Take what follows the answers, until there are turns for the batch."""
        dialogs = self._dialogs
        while dialogs.lack_turns():
            self.act()
            if self._steps.env.busy:
                self._receive()
            dialogs.fill()
            dialogs.raise_due()

    def _receive(self, index: int | None = None) -> None:
        before = set(self._steps.env.busy)
        try:
            found = self._steps.receive(index)
        except EnvError as error:
            gone = before - set(self._steps.env.busy)
            failed = [dialog for dialog in self._dialogs if dialog.slot in gone]
            if not failed:
                raise
            names = [f"{dialog.opening.draw.origin.name}, turn {dialog.number}" for dialog in failed]
            named = error
            if not any(dialog.opening.draw.origin.name in str(error) for dialog in failed):
                named = EnvError(f"the conversation of {', '.join(names)}: {error}")
                named.__cause__ = error
            for dialog in failed:
                self._dialogs.fail(dialog, named)
            return
        for each in found:
            self._take(each)

    def _take(self, stepped: Stepped) -> None:
        """A step has ended."""
        slot, frame = stepped.env_index, stepped.frame
        dialog = self._dialogs.slots[slot]
        assert dialog is not None
        dialog.asked = False
        dialog.total, dialog.number = dialog.total + stepped.reward, dialog.number + 1
        self._conversations.stepped(slot, stepped.root, dialog.opening if stepped.over else None)
        for td in (frame, frame.get("next")):
            if (group := td.get("group_id", None)) is not None:
                td.set("group_id", group * self._conversations.num_slots + slot)
        turn = PooledTurn(frame, dialog.number - 1, dialog.opening.draw.origin, stepped.over)
        self._dialogs.keep(dialog, EndedTurn(turn, dialog.id, dialog.opening))

    def cancel(self, dialogs: Iterable[InSlot]) -> None:
        """See :meth:`TurnTaker.cancel`: wait for their steps, whose turns nobody gets."""
        for dialog in list(dialogs):
            if dialog.asked and dialog.slot in self._steps.env.busy:
                with suppress(EnvError):  # of an environment that begins another conversation next
                    for each in self._steps.receive(dialog.slot):
                        self._conversations.stepped(each.env_index, each.root, dialog.opening if each.over else None)
            dialog.asked = False

    def follow_all(self) -> None:
        """Wait for steps, tools and rewards that are in progress."""
        while self._steps.env.busy:
            self._receive()

    def end_waits(self, in_s: float) -> None:
        """See :meth:`TurnTaker.end_waits`: a step has a limit of its own."""

    def stats(self) -> dict[str, Any]:
        """What it adds to ``stats()``."""
        return {"environments_busy": len(self._steps.env.busy)}

    def close(self) -> None:
        """See :meth:`TurnTaker.close`: the pool ends its steps."""


def _record(ended: EndedTurn) -> TensorDictBase:
    td: TensorDictBase = ended.turn.td
    return td.set(IDS, torch.tensor(ended.id, device="cpu"))


def turns_of_pool(parts: PathParts, env: AsyncEnvPool, call: Call, *, fresh_outputs: bool) -> TurnPath:
    """A path of the conversations of a pool, in the order in which their turns end.

    Args:
        parts: what it is made of.
        env: the pool, each of its environments of batch size ``[1]``.
        call: calls the policy.
        fresh_outputs: whether its outputs are new tensors at each call.
    """
    conversations, whole = PooledConversations(env), parts.options.delivers_whole
    undelivered = Undelivered(conversations)
    cursor = ConversationCursor(lambda: undelivered, parts.ids, delivers_whole=whole)
    failures = Failures(parts.options, lambda: undelivered.failed)
    dialogs = Dialogs(conversations, InSlot, streams=True, whole=whole, cursor=cursor, failures=failures, marks=False)
    steps = PoolSteps(parts, env, call, fresh_outputs=fresh_outputs)
    dialogs.taker = PoolExchange(conversations, steps, dialogs)
    records = RecordMaker(_record, stack=lambda found: stack_frames(found, 0))
    how = {
        "env": "plain: a pool whose environments go by themselves",
        "policy": "plain: acts on the environments that are ready",
    }
    return TurnPath(parts, dialogs, records, how=how, calls_policy=True)
