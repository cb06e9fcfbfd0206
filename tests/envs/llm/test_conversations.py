"""Conversations in slots: openings, tools, environments of the user's own, rewards, their limits and errors."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollwright.data.llm.turns import FinishReason
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.core import Answer, Outcome
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.replies import Dialogue
from rollwright.envs.llm.rewards import Reward
from rollwright.envs.llm.sources import DatasetSource
from rollwright.envs.llm.tools import ParsedAnswer, PythonInterpreter, ToolCall, ToolParser, Toolset
from rollwright.errors import EnvError

ROWS = [{"query": f"prompt {i}", "answer": i} for i in range(20)]


def answer(text: str) -> Answer:
    return Answer({"role": "assistant", "content": text}, text, torch.tensor([1, 2, 3]), FinishReason.STOP)


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[DatasetConversations] = []

    def conversations(slots: int = 1, repeats: int = 1, **kwargs: Any) -> DatasetConversations:
        made.append(DatasetConversations(DatasetSource(ROWS, repeats=repeats), slots, **kwargs))
        return made[-1]

    yield conversations
    for one in made:
        one.close()


def ask(conversations: DatasetConversations, text: str, slot: int = 0) -> Outcome:
    conversations.submit({slot: answer(text)})
    outcome = conversations.outcomes(20.0)[slot]
    if outcome.error is not None:
        raise outcome.error
    return outcome


def begin(conversations: DatasetConversations) -> None:
    opening = conversations.open(0)
    if opening.error is not None:
        raise opening.error


def call(name: str, **arguments: Any) -> str:
    import json

    return "Let me see. <tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def parsed_as(found: Any) -> ToolParser:
    class Fixed(ToolParser):
        def parse(self, text: str) -> Any:
            if isinstance(found, Exception):
                raise found
            return found

    return Fixed()


# Openings ---------------------------------------------------------------------------------------


def test_openings_in_the_three_modes() -> None:
    source = DatasetSource([{"query": "hi", "tokens": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]}])
    history = DatasetConversations(source, 1, prompts=PromptFormat(system_prompt="Be brief."))
    assert history.open(0).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert history.template == {}
    text = DatasetConversations(source, 1, prompts=PromptFormat("text", "query"))
    assert text.open(0).text == "hi"
    assert text.template is None
    tokens = DatasetConversations(source, 1, prompts=PromptFormat("tokens"))
    assert tokens.open(0).tokens.tolist() == [5, 6]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reason", "ends"), [("stop", "terminated"), ("length", "truncated"), ("cancelled", "truncated")]
)
def test_an_answer_that_was_cut_off_truncates_its_conversation(make: Any, reason: str, ends: str) -> None:
    conversations = make(rewards=lambda completions, **columns: [1.0])
    conversations.open(0)
    conversations.submit({0: replace(answer("4"), finish_reason=FinishReason(reason))})
    outcome = conversations.outcomes(20.0)[0]
    assert (outcome.terminated, outcome.truncated, outcome.reward) == (ends == "terminated", ends == "truncated", 1.0)


def test_a_row_with_messages_keeps_its_own_system_prompt() -> None:
    messages = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    conversations = DatasetConversations(
        DatasetSource([{"messages": messages}]), 1, prompts=PromptFormat(system_prompt="yours")
    )
    assert conversations.open(0).messages == messages


_TEXT = [{"type": "text", "text": "hi"}]


def test_parts_of_text_are_text_in_prompts_replies_and_results(make: Any) -> None:
    rows = [{"messages": [{"role": "user", "content": _TEXT}]}]
    assert DatasetConversations(DatasetSource(rows), 1).open(0).messages == [{"role": "user", "content": "hi"}]
    assert DatasetConversations(DatasetSource([{"query": _TEXT}]), 1).open(0).messages[0]["content"] == "hi"
    text = DatasetConversations(DatasetSource([{"text": _TEXT}]), 1, prompts=PromptFormat("text"))
    assert text.open(0).text == "hi"

    class Parts:
        def __init__(self, row: Any) -> None:
            pass

        def reply(self, messages: Any) -> Any:
            return [{"role": "user", "content": _TEXT}], 0.0, False

    def tool(kind: str) -> Any:
        """See."""
        return [*_TEXT, {"type": kind, "text": "!"}]

    conversations = make(tools=[tool], dialogue=Dialogue(Parts))
    conversations.open(0)
    assert ask(conversations, "a").messages == ({"role": "user", "content": "hi"},)
    assert ask(conversations, call("tool", kind="text")).messages[0]["content"] == "hi!"
    refused = ask(conversations, call("tool", kind="image")).messages[0]["content"]
    assert refused.startswith("Error: ValueError: content: expected text, or parts")
    assert "'image' at place 1" in refused
    listed = ask(conversations, call("tool", kind="page")).messages[0]["content"]  # data, no parts
    assert listed.startswith('[{"type": "text"')


@pytest.mark.parametrize(
    ("row", "prompts", "message"),
    [
        ({"question": "hi"}, PromptFormat(), r"prompt 0 .* no column 'query' or .*\['question'\]. Pass data_key="),
        ({"query": 3}, PromptFormat(), r"column 'query' is a int, expected a string or a list of messages"),
        ({"text": [1]}, PromptFormat("text"), r"column 'text' is a list, expected a string"),
        ({"tokens": "abc"}, PromptFormat("tokens"), r"column 'tokens' is a str, expected token ids"),
        ({"query": [{"type": "image"}]}, PromptFormat(), r"the column 'query': content: .* part of type 'image' at"),
        ({"text": [{"type": "audio"}]}, PromptFormat("text"), r"the column 'text': content: .* part of type 'audio'"),
        (
            {"messages": [{"role": "user", "content": [*_TEXT, {"type": "video"}]}]},
            PromptFormat(),
            r"prompt 0 .* the column 'messages': content: .* part of type 'video' at place 1. .* take it out",
        ),
    ],
)
def test_a_row_without_a_prompt_is_named(row: Any, prompts: PromptFormat, message: str) -> None:
    conversations = DatasetConversations(DatasetSource([row]), 1, prompts=prompts)
    with pytest.raises(EnvError, match=message):
        begin(conversations)


# Rewards ----------------------------------------------------------------------------------------


def length(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
    assert columns["prompts"][0][0]["content"] == f"prompt {answer[0]}"
    assert columns["completion_ids"][0] == [1, 2, 3]
    return [float(len(completion[0]["content"])) for completion in completions]


async def halves(completions: list[Any]) -> list[float]:
    await asyncio.sleep(0)
    return [0.5 for _ in completions]


def process_id(completions: list[Any]) -> list[float]:
    return [float(os.getpid()) for _ in completions]


def test_weighted_rewards_in_thread_loop_and_process_are_summed(make: Any) -> None:
    conversations = make(rewards=[length, Reward(halves, weight=2.0), Reward(process_id, weight=1.0, processes=1)])
    conversations.open(0)
    outcome = ask(conversations, "four")
    assert outcome.terminated
    assert outcome.messages == ()
    pid = int(outcome.reward - 5.0)
    assert pid != os.getpid()
    os.kill(pid, 0)
    conversations.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert outcome.seconds["reward"] > 0


def test_a_reward_of_a_group_is_called_once_with_all_repeats(make: Any) -> None:
    calls: list[list[str]] = []

    def rank(completions: list[Any], answer: list[int]) -> list[float]:
        assert len(set(answer)) == 1
        calls.append([completion[0]["content"] for completion in completions])
        return [float(i) for i in range(len(completions))]

    conversations = make(slots=3, repeats=3, rewards=[Reward(rank, per="group")])
    for slot in range(3):
        conversations.open(slot)
    for slot in (2, 0):
        conversations.submit({slot: answer(f"from {slot}")})
        assert conversations.outcomes(None) == {}
    assert conversations.waiting == [0, 2]
    conversations.submit({1: answer("from 1")})
    assert {slot: outcome.reward for slot, outcome in conversations.outcomes().items()} == {0: 0.0, 1: 1.0, 2: 2.0}
    assert calls == [["from 0", "from 1", "from 2"]]


def test_a_group_goes_on_without_a_conversation_that_was_dropped(make: Any) -> None:
    sizes = []

    def count(completions: list[Any]) -> list[float]:
        sizes.append(len(completions))
        return [1.0] * len(completions)

    conversations = make(slots=3, repeats=3, rewards=[Reward(count, per="group")])
    for slot in range(3):
        conversations.open(slot)
    conversations.submit({0: answer("a"), 1: answer("b")})
    conversations.open(2)
    assert set(conversations.outcomes()) == {0, 1}
    assert sizes == [2]


def test_a_group_needs_as_many_slots_as_repeats() -> None:
    with pytest.raises(ValueError, match=r"batch_size: a reward of whole groups needs 4 .* got 3. Pass batch_size=4"):
        DatasetConversations(DatasetSource(ROWS, repeats=4), 3, rewards=[Reward(halves, per="group")])


def raises(completions: list[Any]) -> list[float]:
    raise KeyError("gold")


def too_few(completions: list[Any]) -> list[float]:
    return []


def nan(completions: list[Any]) -> list[float]:
    return [float("nan")]


def words(completions: list[Any]) -> list[Any]:
    return ["1.0"]


def infinite(completions: list[Any]) -> list[Any]:
    return [float("-inf")]


def huge(completions: list[Any]) -> list[Any]:
    return [10**400]


def of_a_column(completions: list[Any], label: Any) -> list[Any]:
    return [1.0]


def forever(completions: list[Any]) -> list[float]:
    time.sleep(3600)
    return [0.0]


async def never(completions: list[Any]) -> list[float]:
    await asyncio.Event().wait()
    return [0.0]


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, r"'raises' raised .*KeyError.*gold.*Correct the function"),
        (too_few, r"'too_few' returned 0 numbers for 1 completions. Return a list with one number"),
        (nan, r"'nan' returned NaN. Return a finite number, or None"),
        (infinite, r"'infinite' returned -inf. Return a finite number, or None"),
        (huge, r"'huge' returned 10+\.\.\., expected a number"),
        (words, r"'words' returned '1.0', expected a number"),
        (of_a_column, r"'of_a_column' has the parameters \['label'\], .* is given .*'completion_ids', .*Correct"),
        (forever, r"'forever' took longer than 0.3 seconds. Make it faster"),
    ],
)
def test_a_reward_that_fails_is_named_within_its_limit(make: Any, function: Any, message: str, processes: int) -> None:
    conversations = make(rewards=[Reward(function, processes=processes, timeout_s=0.3)])
    conversations.open(0)
    began = time.monotonic()
    with pytest.raises(EnvError, match=rf"conversation 0 from prompt 0 \(epoch 0, group 0\): .* {message}"):
        ask(conversations, "a")
    assert time.monotonic() - began < 15.0


def test_what_fails_in_one_conversation_leaves_the_others(make: Any) -> None:
    def picky(completions: Any, **columns: Any) -> list[float]:
        if completions[0][0]["content"] == "bad":
            raise OSError("no connection")
        return [1.0]

    conversations = make(3, rewards=picky)
    for slot, text in enumerate(["good", "bad", "good"]):
        conversations.open(slot)
        conversations.submit({slot: answer(text)})
    found: dict[int, Outcome] = {}
    while len(found) < 3:
        found |= conversations.outcomes(20.0)
    assert [found[slot].reward for slot in (0, 2)] == [1.0, 1.0]
    assert found[1].error is not None
    assert isinstance(found[1].error.__cause__, OSError)
    assert not found[1].terminated


@pytest.mark.parametrize("begins_again", [True, False])
def test_a_group_waits_for_one_that_failed_until_its_slot_has_another(make: Any, begins_again: bool) -> None:
    class Once:
        def __init__(self, row: Any) -> None: ...

        def reply(self, messages: Any) -> Any:
            if messages[-1]["content"] == "bad":
                raise OSError("no connection")
            return "", 0.0, True

    def number(completions: Any, **columns: Any) -> list[float]:
        return [float(len(completions))] * len(completions)

    reward = Reward(number, per="group")
    conversations = make(3, repeats=3, rewards=reward, dialogue=Dialogue(Once))
    openings = [conversations.open(slot) for slot in range(3)]
    conversations.submit({0: answer("a"), 1: answer("bad"), 2: answer("c")})
    while not (found := conversations.outcomes(5.0)):
        pass
    assert isinstance(found[1].error.__cause__, OSError)
    while conversations.outcomes(None):
        pass
    assert conversations.waiting == [0, 2]
    if begins_again:
        conversations.load(1, openings[1], openings[1].messages, {})
        assert conversations.outcomes(None) == {}
        conversations.submit({1: answer("b")})
    else:
        conversations.open(1)
    rest = conversations.outcomes(20.0)
    assert {slot: outcome.reward for slot, outcome in rest.items()} == (
        {0: 3.0, 1: 3.0, 2: 3.0} if begins_again else {0: 2.0, 2: 2.0}
    )


def test_a_coroutine_reward_is_cancelled_at_its_limit(make: Any) -> None:
    conversations = make(rewards=[Reward(never, timeout_s=0.1)])
    conversations.open(0)
    with pytest.raises(EnvError, match=r"'never' took longer than 0.1 seconds"):
        ask(conversations, "a")


def test_none_counts_as_nothing_and_other_returns_are_an_error(make: Any) -> None:
    conversations = make(rewards=[lambda completions: [None], lambda completions: torch.ones(1)])
    conversations.open(0)
    assert ask(conversations, "a").reward == 1.0
    with pytest.raises(TypeError, match="rewards: expected functions"):
        make(rewards=3)
    with pytest.raises(ValueError, match="per: expected 'conversation' or 'group'"):
        Reward(halves, per="turn")  # type: ignore[arg-type]


class Sizes:
    """A reward function that notes of how many conversations each call was, and waits until it may return."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_return = threading.Event()

    def __call__(self, completions: list[Any]) -> list[float]:
        self.sizes.append(len(completions))
        self.may_return.wait(20.0)
        return [float(len(completion[0]["content"])) for completion in completions]


def test_conversations_that_have_ended_meanwhile_are_rewarded_in_one_call(make: Any) -> None:
    sizes = Sizes()
    conversations = make(slots=8, rewards=sizes)
    for slot in range(8):
        conversations.open(slot)
    conversations.submit({0: answer("a")})  # it waits for no other
    assert conversations.outcomes(0.0) == {}
    conversations.submit({1: answer("bb"), 2: answer("ccc")})
    conversations.submit({slot: answer("d" * slot) for slot in range(3, 8)})
    conversations.open(4)  # which drops the one that waits there
    sizes.may_return.set()
    found: dict[int, Outcome] = {}
    while len(found) < 7:
        found |= conversations.outcomes(20.0)
    assert {slot: outcome.reward for slot, outcome in found.items()} == {0: 1, 1: 2, 2: 3, 3: 3, 5: 5, 6: 6, 7: 7}
    assert sizes.sizes == [1, 6]


def test_processes_share_what_waits_and_coroutines_take_all(make: Any) -> None:
    async def all_of_them(completions: list[Any]) -> list[float]:
        return [float(len(completions))] * len(completions)

    conversations = make(slots=5, rewards=[Reward(process_id, processes=2), Reward(all_of_them, name="all")])
    for slot in range(5):
        conversations.open(slot)
    conversations.submit({slot: answer("a") for slot in range(5)})
    found: dict[int, Outcome] = {}
    while len(found) < 5:
        found |= conversations.outcomes(20.0)
    processes = [float(found[slot].extras["next", "rewards", "process_id"]) for slot in range(5)]
    assert sorted(map(processes.count, set(processes))) == [2, 3]
    assert {float(outcome.extras["next", "rewards", "all"]) for outcome in found.values()} == {5.0}


@pytest.mark.parametrize("processes", [0, 1])
def test_a_call_that_fails_is_made_again_for_each_so_that_the_error_is_of_one(make: Any, processes: int) -> None:
    conversations = make(slots=3, rewards=Reward(no_bad, processes=processes))
    for slot in range(3):
        conversations.open(slot)
    conversations.submit({0: answer("good"), 1: answer("bad"), 2: answer("also")})
    found: dict[int, Outcome] = {}
    while len(found) < 3:
        found |= conversations.outcomes(20.0)
    assert (found[0].reward, found[1].reward, found[2].reward) == (1.0, 0.0, 1.0)
    assert [slot for slot, outcome in found.items() if outcome.error is not None] == [1]
    assert "conversation 0 from prompt 1 (epoch 0, group 1): the reward function 'no_bad' raised" in str(found[1].error)


def no_bad(completions: list[Any]) -> list[float]:
    if any(completion[0]["content"] == "bad" for completion in completions):
        raise ValueError("bad")
    return [1.0] * len(completions)


def test_each_reward_is_known_by_its_name_beside_the_sum(make: Any) -> None:
    def silent(completions: list[Any]) -> list[Any]:
        return [None] * len(completions)

    functions = [Reward(halves, weight=4.0), silent, lambda completions: [1.0], lambda completions: [3.0]]
    conversations = make(rewards=functions, dialogue=Dialogue(Countdown))
    conversations.open(0)
    first = ask(conversations, "a")
    last = ask(conversations, "b")
    names = ["halves", "silent", "<lambda>", "<lambda>_2"]
    assert [float(first.extras["next", "rewards", name]) for name in names] == [0.0] * 4
    values = [float(last.extras["next", "rewards", name]) for name in names]
    assert (values[0], values[2], values[3]) == (0.5, 1.0, 3.0)
    assert values[1] != values[1]  # it had nothing to say
    assert last.reward == 6.5


class AsyncObject:
    async def __call__(self, completions: list[Any]) -> list[float]:
        return [1.0]


def test_a_function_that_cannot_be_called_so_is_refused_when_it_is_given() -> None:
    with pytest.raises(ValueError, match=r"is a coroutine function, which runs in this process. Pass processes=0"):
        Reward(AsyncObject(), processes=1)
    with pytest.raises(TypeError, match=r"the parameters \['obj'\] of 'len' are positional"):
        Reward(len)
    with pytest.raises(TypeError, match=r"'max' does not say which parameters it has. Wrap it"):
        Reward(max)


def test_what_a_reward_function_changes_is_its_own(make: Any) -> None:
    def strips(prompts: list[Any], completions: list[Any], completion_ids: list[Any]) -> list[float]:
        prompts[0].clear()
        completions[0][0]["content"] = "changed"
        completion_ids[0].clear()
        return [0.0]

    def reads(prompts: list[Any], completions: list[Any], completion_ids: list[Any]) -> list[float]:
        return [float(len(prompts[0])), float(completions[0][0]["content"] == "a") + len(completion_ids[0])][1:]

    conversations = make(rewards=[strips, reads])
    opening = conversations.open(0)
    assert ask(conversations, "a").reward == 4.0
    assert [message["content"] for message in opening.messages] == [ROWS[0]["query"]]


# Tools ------------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def later(text: str) -> str:
    """Say it later."""
    await asyncio.sleep(0)
    return text


def stuck() -> str:
    """Never return."""
    time.sleep(3600)
    return ""


def test_results_of_tools_are_messages_and_the_model_goes_on(make: Any) -> None:
    conversations = make(tools=[add, later])
    assert [schema["function"]["name"] for schema in conversations.template["tools"]] == ["add", "later"]
    conversations.open(0)
    outcome = ask(conversations, call("add", a=1, b=2) + call("later", text="x"))
    assert not outcome.terminated
    assert [dict(message) for message in outcome.messages] == [
        {"role": "tool", "name": "add", "tool_call_id": "call_0_0", "content": "3"},
        {"role": "tool", "name": "later", "tool_call_id": "call_0_1", "content": "x"},
    ]
    assert outcome.response is not None
    assert outcome.response["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert "tool" in outcome.seconds
    assert ask(conversations, "It is 3.").terminated


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call("add", a=1), r"missing: \['b'\]"),
        (call("add", a=1, b=2, c=3), r"unknown: \['c'\]"),
        (call("sub", a=1), r"no tool 'sub'; there are \['add', 'stuck'\]"),
        (call("add", a="x", b=1), "TypeError: can only concatenate"),
        ("<tool_call>{oops</tool_call>", "the call is no JSON"),
        (call("stuck"), "took longer than 0.2 seconds"),
    ],
)
def test_an_error_of_a_tool_is_a_message_or_is_raised(make: Any, text: str, reason: str) -> None:
    import re

    from rollwright.envs.llm.tools import FunctionTool

    tools = [add, FunctionTool(stuck, timeout_s=0.2)]
    conversations = make(tools=Toolset(tools))
    conversations.open(0)
    message = ask(conversations, text).messages[0]
    assert message["role"] == "tool"
    assert re.search(reason, message["content"])
    strict = make(tools=Toolset(tools, on_error="raise"))
    strict.open(0)
    with pytest.raises(EnvError, match=rf"conversation 0 from prompt 0 .* turn 0: the tool .* failed: .*{reason}"):
        ask(strict, text)


class NoText:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class AsyncTool:
    """Says what it is given."""

    async def __call__(self, text: str) -> str:
        return text


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("x" * 100_000_000, "x" * 100 + "\n[result cut after 100 characters]"),
        ("a\ud800b\0", "a\ufffdb\0"),
        (NoText(), "Error: RuntimeError: no text"),
    ],
)
def test_any_result_of_a_tool_becomes_a_text_that_a_model_can_read(make: Any, result: Any, content: str) -> None:
    def tool() -> Any:
        return result

    conversations = make(tools=Toolset([tool], result_chars=100))
    conversations.open(0)
    assert ask(conversations, call("tool")).messages[0]["content"] == content


def test_an_object_with_an_async_call_is_a_tool(make: Any) -> None:
    conversations = make(tools=[AsyncTool()])
    conversations.open(0)
    assert ask(conversations, call("AsyncTool", text="yes")).messages[0]["content"] == "yes"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (IndexError("odd"), "the parser Fixed raised IndexError: odd. Correct its method parse"),
        (None, "the parser Fixed returned None, expected a ParsedAnswer with ToolCall objects. Correct"),
        (ParsedAnswer("", [ToolCall("tool", None)]), "the parser Fixed returned .*, expected a ParsedAnswer with"),  # type: ignore[arg-type]
    ],
)
def test_a_parser_that_is_wrong_is_named(make: Any, found: Any, message: str) -> None:
    def tool() -> str:
        return ""

    conversations = make(tools=Toolset([tool], parser=parsed_as(found)))
    conversations.open(0)
    with pytest.raises(EnvError, match=rf"conversation 0 from prompt 0 .*, turn 0: {message}"):
        ask(conversations, "a")


def test_a_call_that_cannot_be_read_stays_in_the_text_and_the_model_reads_why(make: Any) -> None:
    conversations = make(tools=[add])
    conversations.open(0)
    bad = "<tool_call>{oops}</tool_call>"
    outcome = ask(conversations, f"So: {bad}")
    assert outcome.response == {"role": "assistant", "content": f"So: {bad}"}
    [message] = outcome.messages
    assert set(message) == {"role", "content"}
    assert "Error: the call is no JSON" in message["content"]
    outcome = ask(conversations, f"And {call('add', a=1, b=2)} or {bad}.")
    assert outcome.response["content"] == f"And Let me see.  or {bad}."  # type: ignore[index]
    assert [made["id"] for made in outcome.response["tool_calls"]] == ["call_1_0"]  # type: ignore[index]
    assert outcome.messages[0] == {"role": "tool", "name": "add", "tool_call_id": "call_1_0", "content": "3"}
    assert "the call is no JSON" in outcome.messages[1]["content"]


def test_what_a_parser_leaves_out_of_the_text_is_there_where_nothing_can_be_read(make: Any) -> None:
    conversations = make(tools=Toolset([add], parser=parsed_as(ParsedAnswer("", [ToolCall("add", error="odd")]))))
    conversations.open(0)
    outcome = ask(conversations, "[add 1")
    assert outcome.response == {"role": "assistant", "content": "[add 1"}
    assert outcome.messages == ({"role": "tool", "name": "add", "content": "Error: odd"},)


def test_calls_of_an_answer_run_side_by_side_and_results_come_in_their_order(make: Any) -> None:
    all_there = threading.Barrier(3)

    def meet(number: int) -> int:
        """Meet."""
        all_there.wait(20.0)
        time.sleep(0.02 * (3 - number))
        return number

    conversations = make(tools=[meet])
    conversations.open(0)
    outcome = ask(conversations, "".join(call("meet", number=number) for number in range(3)) + call("none"))
    assert [message["content"] for message in outcome.messages[:3]] == ["0", "1", "2"]
    assert "there is no tool 'none'" in outcome.messages[3]["content"]


def test_calls_that_build_on_each_other_are_made_one_after_another(make: Any) -> None:
    conversations = make(tools=[PythonInterpreter(timeout_s=20.0), add])
    conversations.open(0)
    codes = ["import time; time.sleep(0.1); x = 1", "x += 1", "x"]
    outcome = ask(conversations, "".join(call("python", code=code) for code in codes) + call("add", a=1, b=1))
    assert [message["content"].strip() for message in outcome.messages] == ["", "", "2", "2"]


def test_calls_within_reasoning_are_not_made(make: Any) -> None:
    made: list[str] = []

    def note(text: str) -> str:
        """Note."""
        made.append(text)
        return text

    conversations = make(tools=[note])
    conversations.open(0)
    thought = f"<think>Perhaps {call('note', text='no')}?</think>"
    outcome = ask(conversations, f"{thought} Yes: {call('note', text='yes')}")
    assert [message["content"] for message in outcome.messages] == made == ["yes"]
    assert outcome.response["content"] == f"{thought}Yes: Let me see."  # type: ignore[index]
    assert outcome.response["tool_calls"][0]["function"]["arguments"] == {"text": "yes"}  # type: ignore[index]
    # The template wrote the mark before it.
    outcome = ask(conversations, f"{call('note', text='no')}</think>{call('note', text='also')}")
    assert made == ["yes", "also"]
    # A conversation with nothing but reasoning calls nothing, and ends.
    assert ask(conversations, f"<think>{call('note', text='no')}").terminated
    assert made == ["yes", "also"]
    every = make(tools=Toolset([note], reasoning=None))
    every.open(0)
    assert ask(every, thought).messages[0]["content"] == "no"


def test_rounds_of_tools_have_a_limit(make: Any) -> None:
    conversations = make(tools=Toolset([add], max_rounds=2))
    conversations.open(0)
    outcomes = [ask(conversations, call("add", a=1, b=2)) for _ in range(3)]
    assert [outcome.truncated for outcome in outcomes] == [False, False, True]


def test_an_interpreter_lasts_for_a_conversation(make: Any) -> None:
    conversations = make(slots=2, tools=[PythonInterpreter(timeout_s=20.0)])
    for slot in range(2):
        conversations.open(slot)
    assert ask(conversations, call("python", code="import os; x = 7; os.getpid()")).messages[0]["content"]
    assert ask(conversations, call("python", code="x + 1")).messages[0]["content"] == "8\n"
    assert "NameError" in ask(conversations, call("python", code="x"), slot=1).messages[0]["content"]
    pid = int(ask(conversations, call("python", code="os.getpid()")).messages[0]["content"])
    with pytest.raises(EnvError, match="the tool 'python' has a process that cannot be saved"):
        conversations.state(0)
    assert ask(conversations, "done").terminated
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# Environments of the user's own -----------------------------------------------------------------


class Countdown:
    def __init__(self, row: Any) -> None:
        self.left = row["answer"] + 2

    def reply(self, messages: list[Any]) -> Any:
        self.left -= 1
        return f"{self.left} left after {messages[-1]['content']}", 0.5, self.left == 0


class Saved(Countdown):
    def state_dict(self) -> Any:
        return {"left": self.left}

    def load_state_dict(self, state_dict: Any) -> None:
        self.left = state_dict["left"]


def test_an_environment_replies_until_it_is_done(make: Any) -> None:
    conversations = make(slots=2, dialogue=Dialogue(Countdown), rewards=lambda completions: [10.0])
    for slot in range(2):
        conversations.open(slot)
    first = ask(conversations, "a")
    assert first.messages == ({"role": "user", "content": "1 left after a"},)
    assert (first.reward, first.terminated) == (0.5, False)
    assert [ask(conversations, "b", slot=1).terminated for _ in range(3)] == [False, False, True]
    last = ask(conversations, "c")
    assert (last.reward, last.terminated, last.messages) == (10.5, True, ())


def test_the_last_turn_that_is_allowed_truncates(make: Any) -> None:
    conversations = make(dialogue=Dialogue(lambda row: Countdown({"answer": 50}), max_turns=2))
    conversations.open(0)
    assert not ask(conversations, "a").truncated
    last = ask(conversations, "b")
    assert (last.truncated, last.terminated) == (True, False)


def test_blocking_environments_do_not_wait_for_each_other(make: Any) -> None:
    both = threading.Barrier(2, timeout=10.0)

    class Meet:
        def __init__(self, row: Any) -> None:
            pass

        def reply(self, messages: Any) -> Any:
            both.wait()
            return "", 1.0, True

    conversations = make(slots=2, dialogue=Dialogue(Meet))
    for slot in range(2):
        conversations.open(slot)
    conversations.submit({0: answer("a"), 1: answer("b")})
    got = dict(conversations.outcomes(20.0))
    while len(got) < 2:
        got |= conversations.outcomes(20.0)
    assert [outcome.reward for outcome in got.values()] == [1.0, 1.0]


class Async:
    def __init__(self, row: Any) -> None:
        pass

    async def reply(self, messages: Any) -> Any:
        await asyncio.sleep(0)
        return {"role": "user", "content": "more"}, torch.tensor([0.0, 0.5, 1.0]), False


def test_an_environment_may_be_async_and_reward_each_token(make: Any) -> None:
    conversations = make(dialogue=Dialogue(Async, max_turns=2), rewards=lambda completions: [2.0])
    conversations.open(0)
    assert ask(conversations, "a").reward.tolist() == [0.0, 0.5, 1.0]
    assert ask(conversations, "b").reward.tolist() == [0.0, 0.5, 3.0]


@pytest.mark.parametrize("mode", ["history", "text"])
def test_an_empty_reply_is_a_message_or_the_end(make: Any, mode: Any) -> None:
    class Silent:
        def __init__(self, row: Any) -> None:
            self.turns = 0

        def reply(self, messages: Any) -> Any:
            self.turns += 1
            return "", 0.0, self.turns == 2

    conversations = make(prompts=PromptFormat(mode), dialogue=Dialogue(Silent))
    conversations.open(0)
    first, second = ask(conversations, "a"), ask(conversations, "b")
    assert [list(first.messages), first.terminated] == [[{"role": "user", "content": ""}], False]
    assert [list(second.messages), second.terminated] == [[], True]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("text", r"returned 'text', expected \(messages, reward, done\)"),
        (("more", None, False), "returned the reward None, expected a number"),
        (("more", float("nan"), False), "returned the reward NaN"),
        (("more", "1.0", False), "returned the reward '1.0', expected a number"),
        (("more", torch.ones(2), False), "returned 2 rewards for the 3 tokens of the answer"),
        (("more", torch.tensor([0.0, 1.0, float("inf")]), False), "returned NaN or infinity among the rewards"),
        ((None, 0.0, False), "returned the messages None and done=False.* Return done=True .*, or a message"),
        (([], 0.0, False), r"returned the messages \[\] and done=False"),
        (([3], 0.0, False), r"returned the messages \[3\]"),
        (
            ([{"role": "user", "content": [{"type": "image"}]}], 0.0, False),
            r"returned messages that no model reads: content: .* 'image' at place 0. .*. Correct its method reply",
        ),
        (("more", 0.0, "no"), "returned done='no', expected True or False"),
        (("more", 0.0, torch.tensor([True, False])), r"returned done=tensor.*, expected True or False"),
        (None, "raised ZeroDivisionError: division by zero"),
        (3600, "took longer than 0.2 seconds. Make it faster"),
    ],
)
def test_a_reply_that_is_wrong_is_named(make: Any, returned: Any, message: str) -> None:
    class Odd:
        def __init__(self, row: Any) -> None:
            pass

        def reply(self, messages: Any) -> Any:
            if returned == 3600:
                time.sleep(returned)
            return 1 / 0 if returned is None else returned

    conversations = make(dialogue=Dialogue(Odd, timeout_s=0.2))
    conversations.open(0)
    with pytest.raises(EnvError, match=rf"conversation 0 from prompt 0 .* turn 0: the environment Odd {message}"):
        ask(conversations, "a")


class Mute:
    def __init__(self, row: Any) -> None:
        pass


class BadEnd(Mute):
    def reply(self, messages: Any) -> Any:
        return "", 1.0, True

    def close(self) -> None:
        raise KeyError("file")


def test_an_environment_without_a_reply_or_with_a_close_that_raises_is_named(make: Any) -> None:
    with pytest.raises(EnvError, match=r"conversation 0 from prompt 0 .*: the environment Mute has no method reply"):
        begin(make(dialogue=Dialogue(Mute)))
    conversations = make(dialogue=Dialogue(BadEnd))
    conversations.open(0)
    with pytest.raises(EnvError, match=r"conversation 0 from prompt 0 .*: the environment BadEnd raised KeyError when"):
        ask(conversations, "a")


def test_an_environment_that_cannot_be_made_is_named(make: Any) -> None:
    conversations = make(dialogue=Dialogue(lambda row: row["gold"]))
    with pytest.raises(EnvError, match=r"prompt 0 .*: the environment raised KeyError when it was made from its row"):
        begin(conversations)


# Saved, sent, misused ---------------------------------------------------------------------------


def test_a_conversation_goes_on_from_its_state(make: Any) -> None:
    conversations = make(dialogue=Dialogue(Saved), rewards=length_of_all)
    opening = conversations.open(0)
    ask(conversations, "a")
    state = pickle.loads(pickle.dumps(conversations.state(0)))
    place = conversations.source.state_dict()
    other = make(dialogue=Dialogue(Saved), rewards=length_of_all)
    other.source.load_state_dict(place)
    other.load(0, opening, (), state)
    assert other.source.draw().origin.index == 1
    last = ask(other, "b")
    assert (last.reward, last.terminated) == (4.5, True)
    careless = make(dialogue=Dialogue(Countdown))
    careless.open(0)
    ask(careless, "a")
    with pytest.raises(EnvError, match=r"the environment Countdown has no state_dict\(\)"):
        careless.state(0)


def length_of_all(completions: list[Any]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def test_it_is_sent_to_another_process_before_it_is_used(make: Any) -> None:
    conversations = make(rewards=[length], tools=[add])
    again = pickle.loads(pickle.dumps(conversations))
    assert again.open(0).messages == conversations.open(0).messages
    again.close()
    with pytest.raises(EnvError, match="some are in progress and cannot be sent"):
        pickle.dumps(conversations)


def test_answers_where_none_is_due_are_an_error(make: Any) -> None:
    conversations = make()
    with pytest.raises(EnvError, match=r"slot 0 has no conversation. Call open\(\)"):
        conversations.submit({0: answer("a")})
    conversations.open(0)
    ask(conversations, "a")
    with pytest.raises(EnvError, match="slot 0 has an answer"):
        conversations.submit({0: answer("a")})
    assert conversations.outcomes(None) == {}


def test_messages_are_copied_once_for_an_environment_however_many_turns_follow(make: Any) -> None:
    seen: list[list[Any]] = []

    class User:
        def __init__(self, row: Any) -> None: ...

        def reply(self, messages: Any) -> Any:
            seen.append(list(messages))
            messages[0]["content"] = "changed"
            messages.clear()
            return "go on", 0.0, False

    conversations = make(dialogue=Dialogue(User))
    begin(conversations)
    for number in range(4):
        ask(conversations, f"answer {number}")
    conversations.rewrite(0, [{"role": "user", "content": "another"}, *conversations._talks[0].messages[1:]])
    ask(conversations, "last")
    assert [len(messages) for messages in seen] == [2, 4, 6, 8, 10]
    for earlier, later in itertools.pairwise(seen[:4]):
        assert all(one is other for one, other in zip(earlier, later, strict=False))
    assert seen[4][0] is not seen[3][0]
    assert [message["content"] for message in conversations._talks[0].messages[1:4]] == [
        "answer 0",
        "go on",
        "answer 1",
    ]
    assert conversations._talks[0].messages[0]["content"] == "another"
