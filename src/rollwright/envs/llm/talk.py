"""Talk: one conversation in a slot; RewardCalls: rewards of conversations that have ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from rollwright.data.llm.turns import Message, Origin
from rollwright.data.transcript import Part
from rollwright.envs.llm.core import Answer, NextTurn, Opening, Outcome
from rollwright.envs.llm.jobs import Finished, Jobs, Lane, ThreadLane
from rollwright.envs.llm.rewards import Reward, Sample, place
from rollwright.envs.llm.tools.core import ParsedAnswer, Tool, ToolCall, ToolSession
from rollwright.errors import EnvError


class Talk:
    """A conversation from its opening on.

    Args:
        opening: how it begins.
        environment: answers the model; None: nothing does.
        extras: further entries of its records, see :attr:`Outcome.extras`.

    Attributes:
        messages: so far, from the opening's on.
        turns: answers so far.
        rounds: of them, those that called tools.
        calls: of tools in the last answer.
        outcome: of the last answer, while it is made.
        busy: an answer was submitted, and its outcome was not taken.
        ended: its last outcome, without rewards of its end; None before.
        over: the conversation has ended, and its rewards are known.
        rewards_left: reward functions that did not return yet.
        num_answered: tokens of the last answer.
    """

    def __init__(self, opening: Opening, environment: Any, extras: Mapping[Any, Any] | None = None) -> None:
        self.opening, self.environment, self._extras = opening, environment, dict(extras or {})
        self.messages: list[Message] = list(opening.messages)
        self.sequences: list[list[Message]] = []  # where the environment chooses among them
        self._num_first = len(opening.messages)
        self.turns = self.rounds = self.rewards_left = self.num_answered = 0
        self.calls: Sequence[ToolCall] = ()
        self.outcome = Outcome(extras=dict(self._extras))
        self.ended: Outcome | None = None
        self.busy = self.over = False
        self._results: dict[int, Message] = {}  # by number of the call
        self._due: list[int] = []  # calls that were not made yet
        self._in_turn: set[str] = set()  # tools whose calls build on each other, while one is made
        self._token_ids: list[int] = []
        self._sessions: dict[str, ToolSession] = {}
        self._stateful: set[str] = set()
        self._shown: tuple[list[Message], list[Message], list[Message]] = [], [], []  # a list, its messages, copies

    @property
    def begun(self) -> bool:
        """Whether the model has answered."""
        return self.turns > 0

    @property
    def origin(self) -> Origin:
        """Where it comes from."""
        return self.opening.draw.origin

    @property
    def turn(self) -> int:
        """The number of the last answer, or of the one to come first."""
        return max(self.turns - 1, 0)

    def answered(self, answer: Answer) -> None:
        """Take an answer."""
        self.turns += 1
        self.busy = True
        self.outcome = Outcome(extras=dict(self._extras))
        self.messages.append(answer.message)
        self.num_answered = len(answer.tokens)
        self._token_ids += answer.tokens.tolist()

    def shown(self) -> list[Message]:
        """The messages for the environment, in a list of its own: one copy of each, which it gets at each turn."""
        whole, originals, copies = self._shown
        if whole is not self.messages:
            whole, originals, copies = self._shown = self.messages, [], []
        while originals and originals[-1] is not whole[len(originals) - 1]:  # of another answer, or what was made of it
            del originals[-1], copies[-1]
        new = whole[len(originals) :]
        originals += new
        copies += [dict(message) for message in new]
        return copies.copy()

    def take_calls(self, text: str, parsed: ParsedAnswer) -> None:
        """Note the calls of the answer, and write those that can be read into its message; others stay in its text."""
        self.calls, self._results, self._due, self._in_turn = parsed.calls, {}, [], set()
        if not parsed.calls:
            return
        made = [
            {
                "id": self._id(number),
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for number, call in enumerate(parsed.calls)
            if call.error is None
        ]
        if made:
            self.messages[-1] = {**self.messages[-1], "content": parsed.content, "tool_calls": made}
        else:
            self.messages[-1] = {**self.messages[-1], "content": text}
        self.outcome.response = self.messages[-1]

    def _id(self, number: int) -> str:
        return f"call_{self.turns - 1}_{number}"

    def session(self, tool: Tool) -> ToolSession:
        """The tool within this conversation."""
        if tool.name not in self._sessions:
            self._sessions[tool.name] = tool.begin()
            if tool.has_state:
                self._stateful.add(tool.name)
        return self._sessions[tool.name]

    def make_call(self, number: int) -> None:
        """A call of the answer can be made."""
        self._due.append(number)

    def calls_to_begin(self, tools: Mapping[str, Tool]) -> list[int]:
        """Calls to begin now: all, but one at a time of a tool whose calls build on each other."""
        found = []
        for number in self._due:
            name = self.calls[number].name
            if name not in self._in_turn:
                found.append(number)
                if tools[name].has_state:
                    self._in_turn.add(name)
        self._due = [number for number in self._due if number not in found]
        return found

    def tool_result(self, number: int, text: str) -> None:
        """Note the result of a call."""
        call = self.calls[number]
        self._in_turn.discard(call.name)
        message = {"role": "tool", "name": call.name} if call.name else {"role": "tool"}
        if call.error is None:  # else the message that it answers has no such call
            message["tool_call_id"] = self._id(number)
        self._results[number] = {**message, "content": text}

    def take_results(self) -> bool:
        """Follow the calls with their results, in their order; whether all are there."""
        if len(self._results) < len(self.calls):
            return False
        self.follow([self._results[number] for number in range(len(self.calls))])
        self.calls = ()
        return True

    def follow(self, messages: Sequence[Message], following: NextTurn | None = None) -> None:
        """Append messages of the environment, to the sequence that goes on."""
        self.outcome.next = following
        if following is not None:
            if following.sequence == len(self.sequences):
                self.sequences.append([])
                self._num_first = self._num_first or len(messages)
            self.messages = self.sequences[following.sequence]
        self.messages.extend(messages)
        self.outcome.messages = (*self.outcome.messages, *messages)

    def end(self) -> None:
        """The conversation has ended; rewards of its end are added to the outcome from here on."""
        self.outcome.messages = ()
        self.ended = replace(self.outcome, seconds=dict(self.outcome.seconds), extras=dict(self.outcome.extras))
        self.close()

    def spent(self, stage: str, seconds: float) -> None:
        """Note seconds of a stage."""
        self.outcome.seconds[stage] = self.outcome.seconds.get(stage, 0.0) + seconds

    def add_reward(self, name: str, number: float | None, weight: float) -> None:
        """Add to the reward of the turn, to that of its last token where each has one; and note it by its name."""
        self.outcome.extras[reward_key(name)] = torch.tensor([math.nan if number is None else number])
        reward, value = self.outcome.reward, 0.0 if number is None else weight * number
        if isinstance(reward, torch.Tensor):
            reward = reward.clone()
            reward[-1] += value
            self.outcome.reward = reward
        else:
            self.outcome.reward = reward + value

    def sample(self, mode: str) -> Sample:
        """The conversation as reward functions see it."""
        opening = self.opening
        first = (self.sequences[0] if self.sequences else self.messages)[: self._num_first]
        same = self._num_first
        if self.sequences:  # the last one may have been edited
            pairs = enumerate(zip(first, self.messages, strict=False))
            same = next((place for place, (a, b) in pairs if a != b), min(same, len(self.messages)))
        following = self.messages[same:]
        if mode == "history":  # copies: a function may change what it is given
            prompt: Any = [dict(message) for message in first]
            completion: Any = [dict(message) for message in following]
        else:
            prompt = opening.text if opening.tokens is None else opening.tokens.tolist()
            completion = "".join(str(message.get("content") or "") for message in following)
        return Sample(self.origin, opening.draw.row, prompt, completion, list(self._token_ids))

    def state(self) -> dict[str, Any]:
        """What it needs to go on.

        Raises:
            EnvError: its tools or its environment cannot be saved.
        """
        if self._stateful:
            raise EnvError(
                f"{place(self.origin)}: the tool {min(self._stateful)!r} has a process that cannot be saved. Save "
                "between conversations, or collect whole ones (trajs_per_batch), which begin again."
            )
        state = self._progress()
        if self.environment is not None:
            save = getattr(self.environment, "state_dict", None)
            if save is None and (self.turns or self.sequences):
                raise EnvError(
                    f"{place(self.origin)}: the environment {type(self.environment).__name__} has no state_dict(), and "
                    "cannot be saved midway. Give it state_dict() and load_state_dict()."
                )
            state["environment"] = None if save is None else save()
        return state

    def ended_state(self) -> dict[str, Any]:
        """What it needs at its end, to be given its rewards."""
        return {**self._progress(), "ended": self.ended}

    def _progress(self) -> dict[str, Any]:
        return {
            "messages": Part(self.messages, len(self.messages)),  # views: a turn does not copy those before it
            "turns": self.turns,
            "rounds": self.rounds,
            "token_ids": Part(self._token_ids, len(self._token_ids)),
            "sequences": [Part(messages, len(messages)) for messages in self.sequences],
            "first": self._num_first,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; an empty one is that of a conversation without answers."""
        if not state:
            return
        self.messages = list(state["messages"])
        self.turns, self.rounds = state["turns"], state["rounds"]
        self._token_ids = list(state["token_ids"])
        self.sequences, self._num_first = [*map(list, state.get("sequences", ()))], state.get("first", self._num_first)
        if state.get("ended") is not None:
            self.outcome = self.ended = state["ended"]
            self.busy = True
        if state.get("environment") is not None:
            self.environment.load_state_dict(state["environment"])

    def close(self) -> None:
        """End tools and environment.

        Raises:
            EnvError: the environment raised.
        """
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        environment, self.environment = self.environment, None
        close = getattr(environment, "close", None)
        if callable(close):
            try:
                close()
            except Exception as error:
                raise EnvError(
                    f"{place(self.origin)}: the environment {type(environment).__name__} raised {type(error).__name__} "
                    f"when it was closed: {error}. Correct its method close."
                ) from error


def reward_key(name: str) -> Any:
    """Where a record has the number that a reward function returned."""
    return ("next", "rewards", name)


@dataclass(slots=True, eq=False)
class Step:
    """What a job is for.

    Attributes:
        kind: ``"tool"``, ``"reply"`` or ``"reward"``.
        slot: of the conversation.
        talk: the conversation; None: a group of them.
        number: of the reward function, or of the call in the answer.
        members: slots and conversations that it is called for.
        samples: the same as it sees them.
    """

    kind: str
    slot: int
    talk: Talk | None
    number: int = 0
    members: Sequence[tuple[int, Talk]] = ()
    samples: Sequence[Sample] = ()


Members = Sequence[tuple[int, Talk]]  # conversations, with their slots


class RewardCalls:
    """Asks for the rewards of conversations that have ended, each alone or of a complete group.

    Args:
        rewards: the functions.
        jobs: run them.
        group_size: how many conversations the group has that a conversation from somewhere belongs to.
        sample: a conversation as reward functions see it.
        waits: whether a conversation waits for rewards; False: it was dropped, or has failed, meanwhile.
        reporting: a context; where it raises, these conversations have failed.
        end: called when all rewards of a conversation are there.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        jobs: Jobs,
        group_size: Callable[[Origin], int],
        sample: Callable[[Talk], Sample],
        *,
        waits: Callable[[int, Talk], bool],
        reporting: Callable[[Members], AbstractContextManager[None]],
        end: Callable[[int, Talk], None],
    ) -> None:
        self._rewards, self._jobs, self._group_size, self._sample = rewards, jobs, group_size, sample
        self._waits, self._reporting, self._end = waits, reporting, end
        self._groups: dict[int, list[tuple[int, Talk]]] = {}  # that ended, and wait for the rest of their group
        self._dropped: dict[int, int] = {}  # of a group that is not complete
        self._to_reward: list[list[tuple[int, Talk]]] = [[] for _ in rewards]  # that ended, by reward function
        self._shared = ThreadLane(1)
        self._lanes: list[Lane] = [reward.lane(self._shared) for reward in rewards]

    @property
    def waiting(self) -> list[int]:
        """Slots whose conversation waits for the rest of its group."""
        return sorted(slot for members in self._groups.values() for slot, _ in members)

    def finish(self, slot: int, talk: Talk) -> None:
        """A conversation is over."""
        talk.rewards_left = len(self._rewards)
        alone = [number for number, reward in enumerate(self._rewards) if reward.per == "conversation"]
        for number in alone:
            self._to_reward[number].append((slot, talk))
        if len(alone) < len(self._rewards):
            self._groups.setdefault(talk.origin.group, []).append((slot, talk))
            self._complete(talk.origin)

    def leave(self, talk: Talk) -> None:
        """A conversation has failed; its group waits for it until it is dropped."""
        if (waiting := self._groups.get(talk.origin.group)) is not None:
            self._groups[talk.origin.group] = [item for item in waiting if item[1] is not talk]

    def drop(self, talk: Talk) -> None:
        """A conversation is dropped: its group is complete without it."""
        if any(reward.per == "group" for reward in self._rewards):
            group = talk.origin.group
            self._groups.setdefault(group, [])
            self.leave(talk)
            self._dropped[group] = self._dropped.get(group, 0) + 1
            self._complete(talk.origin)

    def _complete(self, origin: Origin) -> None:
        """Ask for the rewards of a group, if all of it has ended or was dropped."""
        group = origin.group
        members = self._groups.get(group, [])
        if len(members) + self._dropped.get(group, 0) < self._group_size(origin):
            return
        self._groups.pop(group, None)
        self._dropped.pop(group, None)
        members.sort(key=lambda item: item[1].origin.repeat)
        for number, reward in enumerate(self._rewards):
            if reward.per == "group" and members:
                self._ask(number, members)

    def ask_waiting(self) -> None:
        """Call functions for conversations that have ended meanwhile, as far as there is room."""
        for number, members in enumerate(self._to_reward):
            members = [(slot, talk) for slot, talk in members if self._waits(slot, talk)]
            self._to_reward[number] = members
            if not members:
                continue
            steps = (cast(Step, key) for key in self._jobs.in_progress)
            running = sum(step.kind == "reward" and step.number == number for step in steps)
            calls = self._rewards[number].calls(len(members), running)
            for part in range(calls):
                self._ask(number, members[part::calls])
            if calls > 0:
                self._to_reward[number] = []

    def _ask(self, number: int, members: Members) -> None:
        reward = self._rewards[number]
        samples = [self._sample(talk) for _, talk in members]
        slot, talk = members[0]
        alone = reward.per == "conversation" and len(members) == 1
        step = Step("reward", slot, talk if alone else None, number, members, samples)
        with self._reporting(members):
            arguments = (reward.arguments(samples),)
            self._jobs.start(step, self._lanes[number], reward.call(), arguments, limit_s=reward.timeout_s)

    def rewarded(self, step: Step, end: Finished) -> None:
        """A function has returned, or raised.

        Raises:
            EnvError: it raised, or returned something else than numbers.
        """
        reward = self._rewards[step.number]
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

    def clear(self) -> None:
        """All conversations are gone."""
        self._groups.clear()
        self._dropped.clear()
        for members in self._to_reward:
            members.clear()

    def close(self) -> None:
        """End processes and threads."""
        for lane in (*self._lanes, self._shared):
            lane.close()
