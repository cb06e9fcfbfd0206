"""DatasetConversations: conversations about the prompts of a dataset, with tools, environments and rewards."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import torch

from rollwright._warnings import warn_user
from rollwright.data.llm.turns import FinishReason, Message
from rollwright.data.specs import Composite
from rollwright.envs.llm.core import Answer, Conversations, Opening, Outcome, PromptSource
from rollwright.envs.llm.jobs import Finished, Jobs, ThreadLane
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue, reply_of
from rollwright.envs.llm.rewards import Reward, as_rewards, place
from rollwright.envs.llm.talk import RewardCalls, Step, Talk, reward_key
from rollwright.envs.llm.tools.calls import ToolCalls
from rollwright.envs.llm.tools.toolset import Toolset, as_toolset
from rollwright.errors import EnvError


class DatasetConversations(Conversations):
    """Conversations about the prompts of a source, each in a slot.

    After an answer: tools that it calls run, and the model goes on; else the environment replies; else the conversation
    is over: terminated, or truncated where the answer was cut off (by its length, or cancelled). When it is over,
    reward functions are called, and their weighted sum is added to the reward of its last turn. All of that runs in
    threads, processes and an event loop; :meth:`outcomes` collects it.

    Used by one thread.

    Args:
        source: hands out prompts.
        num_slots: conversations side by side.
        prompts: from rows to prompts.
        template: arguments of the chat template, in history mode; schemas of tools are added to it.
        rewards: reward functions, or :class:`Reward`.
        tools: functions, tools, or a :class:`Toolset`.
        dialogue: how conversations go on.
        columns: of the data, that records have at ``("columns", name)``, as they are.

    Attributes:
        primers: specs of columns of the data that records have at the root, as tensors; None: there are none.

    Raises:
        ValueError: there are fewer slots than a reward of groups needs, or an argument is out of range.

    Example:
        >>> import torch
        >>> from rollwright.envs.llm.sources import DatasetSource
        >>> def short(completions, **columns):
        ...     return [float(len(completion[0]["content"]) < 5) for completion in completions]
        >>> conversations = DatasetConversations(DatasetSource(["2 + 2?"]), 1, rewards=short)
        >>> conversations.open(0).messages
        [{'role': 'user', 'content': '2 + 2?'}]
        >>> answer = Answer({"role": "assistant", "content": "4"}, "4", torch.tensor([7]), FinishReason.STOP)
        >>> conversations.submit({0: answer})
        >>> outcome = conversations.outcomes()[0]
        >>> outcome.reward, outcome.terminated
        (1.0, True)
        >>> conversations.close()
    """

    def __init__(
        self,
        source: PromptSource,
        num_slots: int,
        *,
        prompts: PromptFormat | None = None,
        template: Mapping[str, Any] | None = None,
        rewards: Any = None,
        tools: Any = None,
        dialogue: Dialogue | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        if isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
            raise TypeError(f"columns: expected names of columns of the data, got {columns!r}. Pass a list of strings.")
        self.columns = tuple(columns)
        self.primers: Composite | None = None
        if num_slots < 1:
            raise ValueError(f"num_slots: expected at least 1, got {num_slots}.")
        self.source, self.num_slots = source, num_slots
        self.prompts = PromptFormat() if prompts is None else prompts
        self.dialogue = Dialogue() if dialogue is None else dialogue
        self.history = self.dialogue.history  # for the tokens of a conversation
        self.tools: Toolset | None = as_toolset(tools)
        self.rewards: tuple[Reward, ...] = as_rewards(rewards)
        self._check_groups()
        self.template: Mapping[str, Any] | None = None
        if self.prompts.mode == "history":
            schemas = {} if self.tools is None else {"tools": self.tools.schemas}
            self.template = {**schemas, **(template or {})}
        self._begin()

    def _check_groups(self) -> None:
        repeats, interleave = getattr(self.source, "repeats", 1), getattr(self.source, "interleave", 1)
        needed = (repeats - 1) * interleave + 1
        if self.num_slots < needed and any(reward.per == "group" for reward in self.rewards):
            raise ValueError(
                f"batch_size: a reward of whole groups needs {needed} conversations side by side for {repeats} repeats "
                f"({interleave} prompts in turn), got {self.num_slots}. Pass batch_size={needed}, or "
                "Reward(..., per='conversation')."
            )

    def _begin(self) -> None:
        self.on_wait = None
        self._talks: dict[int, Talk] = {}
        self._ready: dict[int, Outcome] = {}
        self._jobs = Jobs()
        self._ends: deque[Finished] = deque()
        self._for_replies = ThreadLane(self.num_slots)
        self._calling = ToolCalls(self.tools, self._jobs, self.num_slots, self._goes_on)
        self._rewarding = RewardCalls(
            self.rewards,
            self._jobs,
            lambda origin: self.source.group_size(origin),
            lambda talk: talk.sample(self.prompts.mode),
            waits=self._waits,
            reporting=self._reporting,
            end=self._end,
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._talks:
            raise EnvError(
                "conversations: some are in progress and cannot be sent to another process. Send the environment "
                "before its first reset, or a function that makes it."
            )
        made_in_begin = {"on_wait", "_jobs", "_ends", "_for_replies", "_calling", "_rewarding"}
        return {name: value for name, value in self.__dict__.items() if name not in made_in_begin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # Slots ------------------------------------------------------------------------------------------

    def open(self, slot: int) -> Opening:
        """Begin a conversation in a slot; one that was in progress there is dropped."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot: expected 0 to {self.num_slots - 1}, got {slot}.")
        self._drop(slot)
        draw = self.source.draw()
        opening = Opening(draw)
        try:
            if not self.dialogue.opens:
                opening = self.prompts.opening(draw)
            self._begin_talk(slot, opening)
        except EnvError as error:
            return replace(opening, error=error)
        return opening

    def _begin_talk(self, slot: int, opening: Opening, state: Mapping[str, Any] | None = None) -> Talk:
        talk = self._talks[slot] = Talk(opening, self.dialogue.environment_of(opening), self._extras(opening))
        if state:
            talk.load(copy.deepcopy(dict(state)))
        elif self.dialogue.opens:  # its first messages are an outcome
            talk.busy = True
            self._ask_environment(slot, talk, talk.environment.respond, None)
        return talk

    def _ask_environment(self, slot: int, talk: Talk, function: Callable[..., Any], argument: Any) -> None:
        limit_s = self.dialogue.timeout_s
        self._jobs.start(Step("reply", slot, talk), self._for_replies, function, (argument,), limit_s=limit_s)

    def _extras(self, opening: Opening) -> dict[Any, Any]:
        """What records of a conversation have of its row, and of rewards that are to come."""
        found: dict[Any, Any] = {("columns", name): opening.column(name, "columns") for name in self.columns}
        if self.primers is not None:
            for key in self.primers.keys(True, True):
                found[key] = self.primers[key].encode(opening.column(str(key), "primers"))
        return found | {reward_key(reward.name): torch.zeros(1) for reward in self.rewards}

    def _drop(self, slot: int) -> None:
        talk = self._talks.pop(slot, None)
        self._ready.pop(slot, None)
        if talk is None:
            return
        self._jobs.forget(lambda key: isinstance(key, Step) and key.talk is talk)
        talk.close()
        if talk.over and talk.outcome.error is None:
            return
        self._rewarding.drop(talk)

    def submit(self, answers: Mapping[int, Answer]) -> None:
        """Take answers, by slot; tools and rewards may run meanwhile."""
        for slot, answer in answers.items():
            talk = self._talks.get(slot)
            if talk is None or talk.busy or talk.over:
                state = "no conversation" if talk is None else "an answer that nothing followed yet"
                raise EnvError(f"slot {slot} has {state}. Call open(), or outcomes(), first.")
            talk.answered(answer)
            with self._reporting([(slot, talk)]):
                self._follow(slot, talk, answer)
        self._rewarding.ask_waiting()

    @contextmanager
    def _reporting(self, members: Sequence[tuple[int, Talk]]) -> Iterator[None]:
        """Where the ``with`` block raises, these conversations have failed: their outcomes say why."""
        try:
            yield
        except EnvError as error:
            for slot, talk in members:
                if self._talks.get(slot) is talk:
                    self._fail(slot, talk, error)

    def _fail(self, slot: int, talk: Talk, error: EnvError) -> None:
        """A conversation has failed; its group waits for it until its slot has another one."""
        self._jobs.forget(lambda key: isinstance(key, Step) and key.talk is talk)
        self._rewarding.leave(talk)
        talk.outcome = Outcome(seconds=talk.outcome.seconds, error=error)
        talk.over = True
        self._ready[slot] = talk.outcome
        with suppress(EnvError):  # it has failed already
            talk.close()

    def _follow(self, slot: int, talk: Talk, answer: Answer) -> None:
        toolset = self.tools
        if toolset is not None and answer.finish_reason is not FinishReason.CANCELLED:
            try:
                talk.take_calls(answer.text, toolset.parse(answer.text, answer.prompt))
            except ValueError as error:
                where = f"{place(talk.origin)}, turn {talk.turn}"
                raise EnvError(f"{where}: {error}. Correct its method parse.") from error
            if talk.calls:
                if talk.rounds >= toolset.max_rounds:
                    talk.outcome.truncated = True
                    self._finish(slot, talk)
                    return
                talk.rounds += 1
                self._calling.make(slot, talk)
                return
        if talk.environment is None and self.dialogue.goes_on:
            self._goes_on(slot, talk)
            return
        if talk.environment is None:
            complete = answer.finish_reason in (FinishReason.STOP, FinishReason.TOOL)
            talk.outcome.terminated, talk.outcome.truncated = complete, not complete
            self._finish(slot, talk)
            return
        if self.dialogue.opens:
            self._ask_environment(slot, talk, talk.environment.respond, answer)
        else:
            self._ask_environment(slot, talk, talk.environment.reply, talk.shown())

    # Environments and turns -------------------------------------------------------------------------

    def _replied(self, step: Step, talk: Talk, end: Finished) -> None:
        slot = step.slot
        talk.spent("tool", end.seconds)
        where = f"{place(talk.origin)}, turn {talk.turn}: the environment {type(talk.environment).__name__}"
        reply = reply_of(end, where, talk.num_answered, opens=self.dialogue.opens)
        talk.outcome.reward = reply.reward
        if reply.response is not None:
            talk.messages[-1] = talk.outcome.response = reply.response
        talk.follow(reply.messages, reply.next)
        if reply.done:
            talk.outcome.terminated = True
            self._finish(slot, talk)
        else:
            self._goes_on(slot, talk)

    def _goes_on(self, slot: int, talk: Talk) -> None:
        most = self.dialogue.max_turns
        if most is not None and talk.turns >= most:
            talk.outcome.truncated = True
            self._finish(slot, talk)
        else:
            self._ready[slot] = talk.outcome

    # Rewards ----------------------------------------------------------------------------------------

    def _finish(self, slot: int, talk: Talk) -> None:
        """The conversation is over: ask for its rewards."""
        talk.end()
        if self.rewards:
            self._rewarding.finish(slot, talk)
        else:
            self._end(slot, talk)

    def _waits(self, slot: int, talk: Talk) -> bool:
        """Whether a conversation waits for rewards; False: it was dropped, or has failed, meanwhile."""
        return self._talks.get(slot) is talk and not talk.over

    def _end(self, slot: int, talk: Talk) -> None:
        talk.over = True
        self._ready[slot] = talk.outcome

    # What has followed ------------------------------------------------------------------------------

    def outcomes(self, timeout: float | None = None) -> dict[int, Outcome]:
        """Outcomes since the last call, by slot; waits until there is one."""
        self._take(0.0)
        while not self._ready and self._jobs:
            if not self._take(timeout) and timeout is not None:
                break
        ready, self._ready = self._ready, {}
        for slot in ready:
            self._talks[slot].busy = False
        return ready

    def _take(self, timeout: float | None) -> bool:
        """Go on where a job has ended; whether one has."""
        if not self._ends:
            self._ends.extend(self._jobs.wait(timeout) if timeout == 0.0 else self._wait(timeout))
        took = bool(self._ends)
        while self._ends:
            end = self._ends.popleft()
            step = cast(Step, end.key)
            if step.kind == "reward":
                with self._reporting(step.members):
                    self._rewarding.rewarded(step, end)
            elif step.talk is not None and self._talks.get(step.slot) is step.talk:
                with self._reporting([(step.slot, step.talk)]):
                    (self._calling.ended if step.kind == "tool" else self._replied)(step, step.talk, end)
        self._rewarding.ask_waiting()
        return took

    def _wait(self, timeout: float | None) -> list[Finished]:
        note = self.on_wait
        if note is None:
            return self._jobs.wait(timeout)
        steps = [cast(Step, key) for key in self._jobs.in_progress]
        talks = [talk for step in steps for talk in ([step.talk] if step.talk else [talk for _, talk in step.members])]
        note([(talk.origin, talk.turn) for talk in talks])
        ends = self._jobs.wait(timeout)
        if ends or not self._jobs:
            note(())
        return ends

    def resume(self, slot: int, messages: Sequence[Message]) -> None:
        """Go on with a conversation whose last outcome ended it, by messages that follow its last answer.

        Raises:
            EnvError: it has not ended, or its reward was one of a whole group.
        """
        talk = self._talks.get(slot)
        if talk is None or talk.busy or not talk.over:
            raise EnvError(f"slot {slot} has no conversation that has ended. Resume it after its last outcome.")
        if any(reward.per == "group" for reward in self.rewards):
            raise EnvError(
                f"{place(talk.origin)}: its group has its rewards and cannot go on. Use "
                "Reward(..., per='conversation')."
            )
        talk.over, talk.ended = False, None
        talk.follow(messages)

    def rewrite(self, slot: int, messages: Sequence[Message]) -> None:
        """Go on from other messages than those of the conversation so far; between an outcome and an answer.

        Raises:
            EnvError: an answer was submitted, or the conversation is over.
        """
        talk = self._talks.get(slot)
        if talk is None or talk.busy or talk.over:
            raise EnvError(f"slot {slot} has no conversation between an outcome and an answer. Change it there.")
        talk.messages = list(messages)

    @property
    def waiting(self) -> list[int]:
        """Slots whose conversation has ended and waits for the rest of its group."""
        return self._rewarding.waiting

    def cut(self, slot: int) -> bool:
        """End a conversation whose last outcome left no room for an answer."""
        talk = self._talks[slot]
        if not self.rewards:
            return False
        talk.busy = True
        talk.outcome = replace(talk.outcome, truncated=True)  # the one that was taken stays as it is
        self._finish(slot, talk)
        return True

    # Saved conversations ----------------------------------------------------------------------------

    def state(self, slot: int) -> dict[str, Any]:
        """What the conversation of a slot needs to go on, beside its messages; between outcome and answer."""
        talk = self._talks.get(slot)
        if talk is None or talk.busy or talk.over:
            raise EnvError(f"slot {slot} has no conversation between an outcome and an answer. Save it there.")
        return copy.deepcopy(talk.state())

    def ended_state(self, slot: int) -> dict[str, Any]:
        """See :meth:`Conversations.ended_state`; its rewards are asked for again."""
        talk = self._talks.get(slot)
        if talk is None or talk.ended is None or talk.over:
            raise EnvError(f"slot {slot} has no conversation that has ended and waits for its rewards.")
        return copy.deepcopy(talk.ended_state())

    def load(self, slot: int, opening: Opening, messages: Sequence[Message], state: Mapping[str, Any]) -> None:
        """See :meth:`Conversations.load`; one that has failed takes the place again that it had in its group."""
        talk = self._talks.get(slot)
        if talk is not None and talk.outcome.error is not None and talk.origin == opening.draw.origin:
            del self._talks[slot]
        self._drop(slot)
        self.source.claim(opening.draw.origin)
        if not self.dialogue.opens and opening.is_empty:
            self.prompts.opening(opening.draw)  # raises what it has raised before
        talk = self._begin_talk(slot, opening, state)
        if talk.ended is not None:
            self._finish(slot, talk)

    def clear(self) -> None:
        """See :meth:`Conversations.clear`; warns where the environment of a conversation cannot be closed."""
        for error in self._clear():
            warn_user(str(error), RuntimeWarning)

    def _clear(self) -> list[EnvError]:
        self._jobs.forget(lambda key: True)
        talks, self._talks = list(self._talks.values()), {}
        self._ready.clear()
        self._rewarding.clear()
        self._ends.clear()
        errors = []
        for talk in talks:
            try:
                talk.close()
            except EnvError as error:
                errors.append(error)
        return errors

    def close(self) -> None:
        """See :meth:`Conversations.close`.

        Raises:
            EnvError: the environment of a conversation raised; all are closed.
        """
        errors = self._clear()
        for each in (self._rewarding, self._for_replies, self._calling):
            each.close()
        self.dialogue.close()
        if errors:
            raise errors[0]
