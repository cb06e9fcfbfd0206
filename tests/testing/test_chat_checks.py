"""Checks of environments of conversations, on environments that are right and on broken ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rollwright.envs.llm import AgentEnv, ChatEnv, Toolset
from rollwright.testing.chat_checks import check_chat_env

ROWS = [{"query": f"Guess {n}", "number": n} for n in range(3)]


class Guess:
    """Is right."""

    def __init__(self, row: Any) -> None:
        self.number, self.tries = row["number"], 0

    def reply(self, messages: Any) -> Any:
        self.tries += 1
        said = messages[-1]["content"]
        return f"{said[:3]!r} is wrong, {self.tries}", float(self.tries), self.tries > 2 + self.number

    def state_dict(self) -> Any:
        return {"tries": self.tries}

    def load_state_dict(self, state: Any) -> None:
        self.tries = state["tries"]


def texts(env: Any, rows: Any = ROWS, **options: Any) -> list[tuple[bool, str]]:
    return [(finding.is_error, finding.text) for finding in check_chat_env(env, rows, **options).findings]


def test_nothing_is_found_where_all_is_well() -> None:
    report = check_chat_env(Guess, ROWS)
    assert report.findings == []
    assert (report.conversations, report.turns) == (3, 3 + 4 + 5)
    assert (min(report.rewards), max(report.rewards)) == (1.0, 5.0)


class Shares(Guess):
    seen: list[Any] = []  # noqa: RUF012  (that is what is wrong)

    def __init__(self, row: Any) -> None:
        super().__init__(row)
        self.seen.clear()

    def reply(self, messages: Any) -> Any:
        self.seen.append(1)
        return f"{len(self.seen)}", 1.0 + len(self.seen), super().reply(messages)[2]


class Forgets(Guess):
    def state_dict(self) -> Any:
        return {"tries": 0}


class Breaks(Guess):
    def load_state_dict(self, state: Any) -> None:
        raise KeyError("number")


class Raises(Guess):
    def reply(self, messages: Any) -> Any:
        return int(messages[-1]["content"]), 0.0, True


class Hangs(Guess):
    def reply(self, messages: Any) -> Any:
        import time

        time.sleep(5.0)


class BadEnd(Guess):
    def close(self) -> None:
        raise RuntimeError("no file")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Shares, "conversations that run side by side have other replies than one alone"),
        (Forgets, "saved after its first turn goes on otherwise than one that was not"),
        (Breaks, "a conversation that was saved does not go on: KeyError"),
        (Raises, "conversation 0 from prompt 0 .* the environment Raises raised ValueError: invalid literal for int"),
        (Hangs, "the environment Hangs took longer than 0.5 seconds. Make it faster"),
        (BadEnd, "the environment BadEnd raised RuntimeError when it was closed: no file"),
        (object, "prompt 0 .*: the environment raised TypeError when it was made from its row"),
    ],
)
def test_what_is_wrong_is_an_error(env: Any, message: str) -> None:
    import re

    found = texts(env, timeout_s=0.5)
    assert any(is_error and re.search(message, text) for is_error, text in found), found


class Rolls(Guess):
    def reply(self, messages: Any) -> Any:
        return str(random.random()), 1.0, super().reply(messages)[2]


class Endless(Guess):
    def reply(self, messages: Any) -> Any:
        return [{"role": "moderator", "content": "go on"}], 0.0, False


class Unsaved:
    def __init__(self, row: Any) -> None:
        self.left = 2

    def reply(self, messages: Any) -> Any:
        self.left -= 1
        return "more", float(self.left), not self.left


@pytest.mark.parametrize(
    ("env", "messages"),
    [
        (Rolls, ["the same answers have other replies another time", "the reward of each turn is 1"]),
        (
            Endless,
            ["a message has the role 'moderator'", "no conversation ends by itself", "the reward of each turn is 0"],
        ),
        (Unsaved, ["it cannot be saved midway, and begins again .* has no state_dict"]),
    ],
)
def test_what_is_unusual_is_a_note(env: Any, messages: list[str]) -> None:
    import re

    found = texts(env, max_turns=4)
    assert [is_error for is_error, _ in found] == [False] * len(messages)
    for message in messages:
        assert any(re.search(message, text) for _, text in found), found


def test_a_chat_env_with_tools_is_run_as_it_is() -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    def broken(kind: str) -> str:
        """Break."""
        raise LookupError(kind)

    def make() -> ChatEnv:
        tools = Toolset([add, broken], parser="json")
        return ChatEnv.from_dataloader(ROWS, input_mode="text", tools=tools, environment=Guess, max_turns=8)

    report = check_chat_env(make)
    assert [(found.is_error, found.text) for found in report.findings] == [
        (False, "the tool 'broken': Error: LookupError: a")
    ]
    assert report.conversations == 8


def test_programs_that_ask_by_themselves_are_refused() -> None:
    def agent(row: Any, base_url: str, api_key: str) -> None: ...

    with pytest.raises(ValueError, match=r"env: expected a class with a method reply, .* got AgentEnv, whose programs"):
        check_chat_env(lambda: AgentEnv.from_dataloader([{"question": "a"}], agent))


def test_answers_may_be_given() -> None:
    class Echo(Guess):
        said: list[str] = []  # noqa: RUF012

        def reply(self, messages: Any) -> Any:
            self.said.append(messages[-1]["content"])
            return super().reply(messages)

    check_chat_env(Echo, ROWS[:1], answers=["one", "two"])
    assert Echo.said[:3] == ["one", "two", "one"]
