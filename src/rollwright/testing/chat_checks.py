"""Checks of an environment of conversations against a scripted model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from rollwright.data.llm.turns import FinishReason, Message
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.core import Answer, Opening, Outcome
from rollwright.envs.llm.env import ConversationEnv
from rollwright.envs.llm.replies import Dialogue
from rollwright.envs.llm.sources import DatasetSource
from rollwright.envs.llm.tools import JSONToolParser, Tool, Toolset, XMLToolParser
from rollwright.errors import EnvError

ANSWERS = (
    "yes",
    "",
    "42",
    "I do not know.",
    "<|im_end|>\n<|im_start|>user\nMore",
    "\u00e9\u4e2d\U0001f600 " * 200,
    '<think>Perhaps.</think> <tool_call>{"name": 3}</tool_call>',
)
_ROLES = ("user", "assistant", "tool", "system")
_SLOW_S = 1.0
_EXAMPLES = {"string": "a", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True)
class ChatFinding:
    """Something about an environment of conversations.

    Attributes:
        text: what was found, and what to do.
        is_error: False for what is unusual and may be meant.
    """

    text: str
    is_error: bool = True


@dataclass
class ChatReport:
    """What came of a check.

    Attributes:
        findings: what is wrong, or unusual; empty where all is well.
        conversations, turns: how many were run.
        rewards: of turns.
        slowest_s: seconds of the slowest reply.
    """

    findings: list[ChatFinding] = field(default_factory=list)
    conversations: int = 0
    turns: int = 0
    rewards: list[float] = field(default_factory=list)
    slowest_s: float = 0.0

    def add(self, text: str, *, is_error: bool = True) -> None:
        """Note something, once."""
        if all(found.text != text for found in self.findings):
            self.findings.append(ChatFinding(text, is_error))


def check_chat_env(
    env: Any,
    rows: Sequence[Mapping[str, Any]] = ({"query": "2 + 2?"},),
    *,
    answers: Sequence[str] = (),
    max_turns: int = 20,
    timeout_s: float = 10.0,
) -> ChatReport:
    """Run an environment of conversations against a scripted model.

    Args:
        env: a class (or function) that makes an environment with a method ``reply`` from a row; or a function without
            arguments that makes a ``ChatEnv`` or an ``LLMEnv``.
        rows: of the data, for a class.
        answers: of the model; none: some that a model could write.
        max_turns: answers in a conversation at most.
        timeout_s: seconds that a reply may take.

    Raises:
        ValueError: it is an ``AgentEnv``, whose programs ask by themselves.

    Example:
        >>> class Guess:
        ...     def __init__(self, row):
        ...         self.tries = 1
        ...
        ...     def reply(self, messages):
        ...         self.tries += 1
        ...         return "Wrong.", 0.0, self.tries
        >>> [finding.text for finding in check_chat_env(Guess).findings if finding.is_error]
        ['... the environment Guess returned done=2, expected True or False. Correct its method reply.']
    """
    report = ChatReport()
    made = _maker(env, rows, max_turns, timeout_s)
    script = _Script(tuple(answers) or ANSWERS, max_turns, report)
    try:
        cloudpickle.dumps(env)
    except Exception as error:
        report.add(f"it cannot be sent to workers: {type(error).__name__}: {error}. Define it in a module.")
    alone = _run(made, script, 1)
    if any(finding.is_error for finding in report.findings):
        return report
    script.quiet = True  # what follows runs the same again
    again, together = _run(made, script, 1), _run(made, script, 2)
    if again != alone:
        report.add(
            "the same answers have other replies another time, so that a run cannot be repeated. Draw random numbers "
            "from a generator that is made of the row.",
            is_error=False,
        )
    elif together != alone:
        report.add(
            "conversations that run side by side have other replies than one alone: they share something. Keep what "
            "changes in the object (self), and not in the class or the module."
        )
    else:
        _check_state(made, script, alone, report)
    _note_unusual(alone, report)
    return report


_Conversation = list[tuple[Any, ...]]  # of each turn: messages, reward, whether it is over
_Make = Callable[[int], DatasetConversations]  # so many side by side, from the beginning of the data


def _maker(env: Any, rows: Sequence[Mapping[str, Any]], max_turns: int, timeout_s: float) -> _Make:
    """Makes the conversations, so many side by side; each time from the beginning of the data."""
    if not isinstance(env, type) or issubclass(env, ConversationEnv):
        factory: Callable[[], Any] = env
        try:
            made = factory()
        except TypeError:  # it is made from a row
            made = None
        if isinstance(made, ConversationEnv):
            found = made.conversations
            if found.dialogue.opens:
                made.close()
                raise ValueError(
                    f"env: expected a class with a method reply, a ChatEnv or an LLMEnv, got {type(made).__name__}, "
                    "whose programs ask by themselves. Run it with an LLMCollector and a small model."
                )
            drawn = list(_first_rows(found.source))
            alone = [reward for reward in found.rewards if reward.per == "conversation"]
            made.close()
            return lambda slots: DatasetConversations(
                DatasetSource(drawn, epochs=1),
                slots,
                prompts=found.prompts,
                rewards=alone,
                tools=found.tools,
                dialogue=found.dialogue,
            )

    dialogue = Dialogue(env, max_turns, timeout_s)
    return lambda slots: DatasetConversations(DatasetSource(list(rows), epochs=1), slots, dialogue=dialogue)


def _first_rows(source: Any) -> Iterator[Mapping[str, Any]]:
    for _ in range(8):
        try:
            yield source.draw().row
        except StopIteration:
            return


class _Script:
    """Answers by turn, each conversation from another place on.

    Attributes:
        quiet: note nothing.
    """

    def __init__(self, answers: Sequence[str], max_turns: int, report: ChatReport) -> None:
        self._answers, self.max_turns, self.report = answers, max_turns, report
        self.quiet = False

    def answer(self, conversations: DatasetConversations, index: int, turn: int) -> Answer:
        """What the model writes."""
        text = self._answers[(index + turn) % len(self._answers)]
        if conversations.tools is not None and index == 0:
            text = dict(enumerate(_calls(conversations.tools))).get(turn, text)
        tokens = torch.arange(max(len(text), 1))
        return Answer({"role": "assistant", "content": text}, text, tokens, FinishReason.STOP)

    def note(self, outcome: Outcome) -> None:
        """Count a turn, and look at what followed."""
        if self.quiet:
            return
        report, reward = self.report, outcome.reward
        report.turns += 1
        report.rewards.append(float(reward.sum()) if isinstance(reward, torch.Tensor) else float(reward))
        report.slowest_s = max(report.slowest_s, outcome.seconds.get("tool", 0.0))
        for message in outcome.messages:
            if message["role"] not in _ROLES:
                report.add(
                    f"a message has the role {message['role']!r}, which most chat templates do not know. Write one of "
                    f"{', '.join(_ROLES)}.",
                    is_error=False,
                )
            if message["role"] == "tool" and str(message["content"]).startswith("Error: ") and message.get("name"):
                report.add(f"the tool {message['name']!r}: {message['content']}", is_error=False)


def _calls(tools: Toolset) -> Iterator[str]:
    """An answer with a call of each tool, as its parser reads it; a parser of one's own may find none."""
    for tool in tools.tools.values():
        call = json.dumps({"name": tool.name, "arguments": _arguments(tool)})
        if isinstance(tools.parser, JSONToolParser):
            yield call
        elif isinstance(tools.parser, XMLToolParser):
            yield f'<{tools.parser.tag} name="{tool.name}">{json.dumps(_arguments(tool))}</{tools.parser.tag}>'
        else:
            yield f"<tool_call>{call}</tool_call>"


def _arguments(tool: Tool) -> dict[str, Any]:
    parameters = tool.schema["function"].get("parameters", {})
    properties = parameters.get("properties", {})
    return {
        name: next(iter(properties[name].get("enum", [])), _EXAMPLES.get(properties[name].get("type", "string"), "a"))
        for name in parameters.get("required", [])
    }


def _run(make: _Make, script: _Script, slots: int) -> list[_Conversation]:
    """All conversations, by place in the data; errors are findings."""
    conversations, found = make(slots), dict[int, _Conversation]()
    places = itertools.count()
    try:
        open_ones: dict[int, int] = {}
        while True:
            for slot in range(slots):
                if slot not in open_ones and (place := _open(conversations, slot, places, script)) is not None:
                    open_ones[slot], found[place] = place, []
            if not open_ones:
                break
            for slot, place in list(open_ones.items()):
                if not _turn(conversations, slot, place, found[place], script):
                    del open_ones[slot]
    except EnvError as error:
        script.report.add(str(error))
    finally:
        _close(conversations, script)
    if not script.quiet:
        script.report.conversations += len(found)
    return [found[place] for place in sorted(found)]


def _open(conversations: DatasetConversations, slot: int, places: Iterator[int], script: _Script) -> int | None:
    try:
        opening: Opening = conversations.open(slot)
    except StopIteration:
        return None
    if opening.error is not None:
        raise opening.error
    return next(places)


def _turn(conversations: DatasetConversations, slot: int, place: int, turns: _Conversation, script: _Script) -> bool:
    """Take a turn; whether the conversation goes on."""
    conversations.submit({slot: script.answer(conversations, place, len(turns))})
    outcome = conversations.outcomes()[slot]
    if outcome.error is not None:
        raise outcome.error
    script.note(outcome)
    over = outcome.terminated or outcome.truncated
    reward = outcome.reward.tolist() if isinstance(outcome.reward, torch.Tensor) else outcome.reward
    turns.append(([dict(message) for message in outcome.messages], reward, outcome.terminated, over))
    return not over and len(turns) < script.max_turns


def _close(conversations: DatasetConversations, script: _Script) -> None:
    try:
        conversations.close()
    except EnvError as error:
        script.report.add(str(error))


def _check_state(make: _Make, script: _Script, alone: list[_Conversation], report: ChatReport) -> None:
    """Save the first conversation that goes on after its first turn, and go on with it in another object."""
    place = next((place for place, turns in enumerate(alone) if len(turns) > 1), None)
    if place is None:
        return
    first, second = make(1), make(1)
    try:
        for _ in range(place + 1):
            opening = first.open(0)
        said: _Conversation = []
        _turn(first, 0, place, said, script)
        messages: list[Message] = [*opening.messages]
        try:
            state = packed(first.state(0))
        except Exception as error:
            text = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
            report.add(f"it cannot be saved midway, and begins again after a restore: {text}", is_error=False)
            return
        second.load(0, opening, messages, unpacked(state))
        while _turn(second, 0, place, said, script):
            pass
        if said != alone[place]:
            report.add(
                "a conversation that was saved after its first turn goes on otherwise than one that was not. Put all "
                "that changes into state_dict(), and take it from there in load_state_dict()."
            )
    except Exception as error:
        report.add(f"a conversation that was saved does not go on: {type(error).__name__}: {error}")
    finally:
        _close(first, script)
        _close(second, script)


def _note_unusual(conversations: list[_Conversation], report: ChatReport) -> None:
    if conversations and not any(turns and turns[-1][3] and turns[-1][2] for turns in conversations):
        report.add(
            "no conversation ends by itself: each goes on to its limit. Return done=True in the end, or leave it to "
            "max_turns.",
            is_error=False,
        )
    if report.slowest_s > _SLOW_S:
        report.add(
            f"a reply takes {report.slowest_s:.1f} s. Others go on meanwhile; make reply() a coroutine function where "
            "it waits for a network.",
            is_error=False,
        )
    if report.rewards and len(set(report.rewards)) == 1:
        report.add(f"the reward of each turn is {report.rewards[0]:g}, whatever the model writes.", is_error=False)
