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
from rollwright.data.llm.turns import FinishReason, Message, Origin
from rollwright.data.specs import Composite
from rollwright.envs.llm.core import Answer, Conversations, Opening, Outcome, PromptSource
from rollwright.envs.llm.jobs import Finished, Jobs, Lane, ThreadLane
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue, as_reply
from rollwright.envs.llm.rewards import Reward, as_rewards, place
from rollwright.envs.llm.talk import Step, Talk, reward_key
from rollwright.envs.llm.tools.toolset import Toolset, as_toolset, call_of
from rollwright.errors import EnvError

_MOST_CALLS = 16  # of tools, side by side, for each conversation
_METHOD = {False: "reply", True: "respond"}  # of an environment, by whether it writes the first messages


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
        self._groups: dict[int, list[tuple[int, Talk]]] = {}  # that ended, and wait for the rest of their group
        self._dropped: dict[int, int] = {}  # of a group that is not complete
        self._jobs = Jobs()
        self._ends: deque[Finished] = deque()
        self._for_rewards = ThreadLane(1)
        self._for_replies = ThreadLane(self.num_slots)
        self._for_tools = ThreadLane(_MOST_CALLS * self.num_slots)
        self._to_reward: list[list[tuple[int, Talk]]] = [[] for _ in self.rewards]  # that ended, by reward function
        self._lanes: list[Lane] = [reward.lane(self._for_rewards) for reward in self.rewards]

    def __getstate__(self) -> dict[str, Any]:
        if self._talks:
            raise EnvError(
                "conversations: some are in progress and cannot be sent to another process. Send the environment "
                "before its first reset, or a function that makes it."
            )
        made_in_begin = {
            "on_wait",
            "_jobs",
            "_ends",
            "_to_reward",
            "_for_rewards",
            "_for_replies",
            "_for_tools",
            "_lanes",
        }
        return {name: value for name, value in self.__dict__.items() if name not in made_in_begin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # Slots ------------------------------------------------------------------------------------------

    def open(self, slot: int) -> Opening:
        """See :meth:`Conversations.open`."""
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
        talk = self._talks[slot] = self._talk(opening)
        if state:
            talk.load(copy.deepcopy(dict(state)))
        elif self.dialogue.opens:  # its first messages are an outcome
            talk.busy = True
            self._ask_environment(slot, talk, talk.environment.respond, None)
        return talk

    def _ask_environment(self, slot: int, talk: Talk, function: Callable[..., Any], argument: Any) -> None:
        limit_s = self.dialogue.timeout_s
        self._jobs.start(Step("reply", slot, talk), self._for_replies, function, (argument,), limit_s=limit_s)

    def _talk(self, opening: Opening) -> Talk:
        make = self.dialogue.environment
        try:
            environment = None if make is None else make(opening.draw.row)
        except Exception as error:
            raise EnvError(
                f"{place(opening.draw.origin)}: the environment raised {type(error).__name__} when it was made from "
                f"its row: {error}. Correct the class, or the row."
            ) from error
        if environment is not None and not callable(getattr(environment, _METHOD[self.dialogue.opens], None)):
            raise EnvError(
                f"{place(opening.draw.origin)}: the environment {type(environment).__name__} has no method reply. "
                "Write reply(self, messages), which returns messages, reward and whether it is over."
            )
        return Talk(opening, environment, self._extras(opening))

    def _extras(self, opening: Opening) -> dict[Any, Any]:
        """What records of a conversation have of its row, and of rewards that are to come."""
        found: dict[Any, Any] = {("columns", name): self.column(opening, name, "columns") for name in self.columns}
        if self.primers is not None:
            for key in self.primers.keys(True, True):
                found[key] = self.primers[key].encode(self.column(opening, str(key), "primers"))
        return found | {reward_key(reward.name): torch.zeros(1) for reward in self.rewards}

    @staticmethod
    def column(opening: Opening, name: str, argument: str) -> Any:
        """The value of a column in the row of a conversation.

        Raises:
            EnvError: there is no such column; names the argument that asks for it.
        """
        row = opening.draw.row
        if name not in row:
            raise EnvError(
                f"{argument}: the row has no column {name!r}; it has {sorted(map(str, row))}. Correct the key."
            )
        return row[name]

    def _drop(self, slot: int) -> None:
        talk = self._talks.pop(slot, None)
        self._ready.pop(slot, None)
        if talk is None:
            return
        self._jobs.forget(lambda key: isinstance(key, Step) and key.talk is talk)
        talk.close()
        if talk.over and talk.outcome.error is None:
            return
        if any(reward.per == "group" for reward in self.rewards):
            group = talk.origin.group
            self._groups[group] = [item for item in self._groups.get(group, []) if item[1] is not talk]
            self._dropped[group] = self._dropped.get(group, 0) + 1
            self._complete(talk.origin)

    def submit(self, answers: Mapping[int, Answer]) -> None:
        """See :meth:`Conversations.submit`."""
        for slot, answer in answers.items():
            talk = self._talks.get(slot)
            if talk is None or talk.busy or talk.over:
                state = "no conversation" if talk is None else "an answer that nothing followed yet"
                raise EnvError(f"slot {slot} has {state}. Call open(), or outcomes(), first.")
            talk.answered(answer)
            with self._reporting([(slot, talk)]):
                self._follow(slot, talk, answer)
        self._ask_waiting()

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
        if (waiting := self._groups.get(talk.origin.group)) is not None:
            self._groups[talk.origin.group] = [item for item in waiting if item[1] is not talk]
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
                self._make_calls(slot, talk, toolset)
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

    # Tools ------------------------------------------------------------------------------------------

    def _make_calls(self, slot: int, talk: Talk, toolset: Toolset) -> None:
        """Make the calls of the answer, side by side."""
        for number, call in enumerate(talk.calls):
            problem = toolset.problem(call)
            if problem is None:
                talk.make_call(number)
            else:
                self._tool_failed(talk, toolset, number, problem)
        self._next_calls(slot, talk, toolset)

    def _next_calls(self, slot: int, talk: Talk, toolset: Toolset) -> None:
        """Begin the calls that can be; when all results are there, the model goes on."""
        for number in talk.calls_to_begin(toolset.tools):
            call = talk.calls[number]
            tool = toolset.tools[call.name]
            function = call_of(talk.session(tool).function)
            step = Step("tool", slot, talk, number)
            self._jobs.start(step, self._for_tools, function, (dict(call.arguments),), limit_s=tool.timeout_s)
        if talk.take_results():
            self._goes_on(slot, talk)

    def _tool_failed(self, talk: Talk, toolset: Toolset, number: int, reason: str) -> None:
        if toolset.on_error == "raise":
            raise EnvError(
                f"{place(talk.origin)}, turn {talk.turn}: the tool {talk.calls[number].name!r} failed: {reason}. "
                "Correct the tool, or pass Toolset(..., on_error='message') to let the model read that."
            )
        talk.tool_result(number, toolset.content(f"Error: {reason}"))

    def _tool_ended(self, step: Step, talk: Talk, end: Finished) -> None:
        toolset = self.tools
        assert toolset is not None
        talk.spent("tool", end.seconds)
        error: BaseException | None = end.error
        if error is None:
            try:
                talk.tool_result(step.number, toolset.content(end.value))
            except Exception as raised:  # of an object's text
                error = raised
        if isinstance(error, TimeoutError) and "took longer than" in str(error):
            self._tool_failed(talk, toolset, step.number, str(error))
        elif error is not None:
            self._tool_failed(talk, toolset, step.number, f"{type(error).__name__}: {error}")
        self._next_calls(step.slot, talk, toolset)

    # Environments and turns -------------------------------------------------------------------------

    def _replied(self, step: Step, talk: Talk, end: Finished) -> None:
        slot = step.slot
        talk.spent("tool", end.seconds)
        where = f"{place(talk.origin)}, turn {talk.turn}: the environment {type(talk.environment).__name__}"
        if end.error is not None:
            slow = isinstance(end.error, TimeoutError) and "took longer than" in str(end.error)
            what = str(end.error) if slow else f"raised {type(end.error).__name__}: {end.error}"
            wrong = "Correct it" if self.dialogue.opens else "Correct its method reply"
            remedy = "Make it faster, or give it more time (reply_timeout_s=)" if slow else wrong
            raise EnvError(f"{where} {what}. {remedy}.") from end.error
        try:
            reply = as_reply(end.value)
        except ValueError as error:
            raise EnvError(f"{where} {error}. Correct its method reply.") from None
        if isinstance(reply.reward, torch.Tensor) and len(reply.reward) != talk.num_answered:
            raise EnvError(
                f"{where} returned {len(reply.reward)} rewards for the {talk.num_answered} tokens of the answer. "
                "Return one number, or one for each token that was sampled."
            )
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
        talk.rewards_left = len(self.rewards)
        alone = [number for number, reward in enumerate(self.rewards) if reward.per == "conversation"]
        for number in alone:
            self._to_reward[number].append((slot, talk))
        if len(alone) < len(self.rewards):
            self._groups.setdefault(talk.origin.group, []).append((slot, talk))
            self._complete(talk.origin)
        if not self.rewards:
            self._end(slot, talk)

    def _complete(self, origin: Origin) -> None:
        """Ask for the rewards of a group, if all of it has ended or was dropped."""
        group = origin.group
        members = self._groups.get(group, [])
        if len(members) + self._dropped.get(group, 0) < self.source.group_size(origin):
            return
        self._groups.pop(group, None)
        self._dropped.pop(group, None)
        members.sort(key=lambda item: item[1].origin.repeat)
        for number, reward in enumerate(self.rewards):
            if reward.per == "group" and members:
                self._ask(number, members)

    def _ask_waiting(self) -> None:
        """Call reward functions for conversations that have ended meanwhile, as far as there is room."""
        for number, members in enumerate(self._to_reward):
            members = [(slot, talk) for slot, talk in members if self._waits(slot, talk)]
            self._to_reward[number] = members
            if not members:
                continue
            steps = (cast(Step, key) for key in self._jobs.in_progress)
            running = sum(step.kind == "reward" and step.number == number for step in steps)
            calls = self.rewards[number].calls(len(members), running)
            for part in range(calls):
                self._ask(number, members[part::calls])
            if calls > 0:
                self._to_reward[number] = []

    def _ask(self, number: int, members: Sequence[tuple[int, Talk]]) -> None:
        reward = self.rewards[number]
        samples = [talk.sample(self.prompts.mode) for _, talk in members]
        slot, talk = members[0]
        alone = reward.per == "conversation" and len(members) == 1
        step = Step("reward", slot, talk if alone else None, number, members, samples)
        with self._reporting(members):
            arguments = (reward.arguments(samples),)
            self._jobs.start(step, self._lanes[number], reward.call(), arguments, limit_s=reward.timeout_s)

    def _waits(self, slot: int, talk: Talk) -> bool:
        """Whether a conversation waits for rewards; False: it was dropped, or has failed, meanwhile."""
        return self._talks.get(slot) is talk and not talk.over

    def _rewarded(self, step: Step, end: Finished) -> None:
        reward = self.rewards[step.number]
        try:
            if end.error is not None:
                raise reward.raised(step.samples, end.error) from end.error
            numbers = reward.values(end.value, step.samples)
        except EnvError:
            if reward.per == "group" or len(step.members) == 1:
                raise
            for member in step.members:  # so that the error is that of its conversation
                if self._waits(*member):
                    self._ask(step.number, [member])
            return
        for (slot, talk), number in zip(step.members, numbers, strict=True):
            if not self._waits(slot, talk):
                continue
            talk.spent("reward", end.seconds)
            talk.add_reward(reward.name, number, reward.weight)
            talk.rewards_left -= 1
            if not talk.rewards_left:
                self._end(slot, talk)

    def _end(self, slot: int, talk: Talk) -> None:
        talk.over = True
        self._ready[slot] = talk.outcome

    # What has followed ------------------------------------------------------------------------------

    def outcomes(self, timeout: float | None = None) -> dict[int, Outcome]:
        """See :meth:`Conversations.outcomes`."""
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
                    self._rewarded(step, end)
            elif step.talk is not None and self._talks.get(step.slot) is step.talk:
                with self._reporting([(step.slot, step.talk)]):
                    (self._tool_ended if step.kind == "tool" else self._replied)(step, step.talk, end)
        self._ask_waiting()
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
        return sorted(slot for members in self._groups.values() for slot, _ in members)

    def cut(self, slot: int) -> bool:
        """See :meth:`Conversations.cut`."""
        talk = self._talks[slot]
        if not self.rewards:
            return False
        talk.busy = True
        talk.outcome = replace(talk.outcome, truncated=True)  # the one that was taken stays as it is
        self._finish(slot, talk)
        return True

    # Saved conversations ----------------------------------------------------------------------------

    def state(self, slot: int) -> dict[str, Any]:
        """See :meth:`Conversations.state`."""
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
        self._groups.clear()
        self._dropped.clear()
        self._ends.clear()
        for members in self._to_reward:
            members.clear()
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
        for lane in (*self._lanes, self._for_rewards, self._for_replies, self._for_tools):
            lane.close()
        self.dialogue.close()
        if errors:
            raise errors[0]
