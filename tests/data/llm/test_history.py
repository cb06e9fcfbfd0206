"""History and ChatHistory: messages as tensor classes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tensordict import TensorDict, lazy_stack
from tests.llm_models import TEMPLATES, tokenizer

from rollwright.data.llm import ChatHistory, History

CALL = {"id": "1", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "1", "name": "add"},
]


def test_a_chat_and_back() -> None:
    history = History.from_chats(CHAT)
    assert tuple(history.batch_size) == (4,)
    assert history.to_chats() == CHAT
    assert list(history.role) == ["system", "user", "assistant", "tool"]


def test_chats_of_unequal_lengths_are_stacked() -> None:
    chats = [CHAT, CHAT[:1], CHAT[1:3]]
    history = History.from_chats(chats)
    assert history.batch_size[0] == 3
    assert history.to_chats() == chats
    assert history[1].to_chats() == chats[1]
    assert History.from_chats([chats, chats[:1]]).to_chats() == [chats, chats[:1]]


def test_an_empty_history() -> None:
    history = History.from_chats([])
    assert tuple(history.batch_size) == (0,)
    assert history.to_chats() == []
    assert lazy_stack([history, History.from_chats(CHAT)]).to_chats() == [[], CHAT]
    history.append(History(role="user", content="x", batch_size=()))
    assert history.to_chats() == [{"role": "user", "content": "x"}]


def test_indexing_reads_messages() -> None:
    history = History.from_chats(CHAT)
    assert history[-1].content == "5"
    assert history[2].to_chats() == CHAT[2]
    assert history[1:].to_chats() == CHAT[1:]


def test_histories_are_made_field_by_field_too() -> None:
    both = History(role=["user", "assistant"], content=["a", "b"], batch_size=(2,))
    assert both.to_chats() == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    one = History(role="assistant", content="", tool_calls=[CALL], batch_size=())
    assert one.to_chats() == CHAT[2]
    assert lazy_stack([one, History(role="user", content="a", batch_size=())]).to_chats() == [
        CHAT[2],
        {"role": "user", "content": "a"},
    ]


@pytest.mark.parametrize("inplace", [True, False])
def test_append_and_extend(inplace: bool) -> None:
    history = History.from_chats(CHAT[:2])
    one = History(role="assistant", content="5", batch_size=())
    result = history.append(one, inplace=inplace)
    assert (result is history) == inplace
    assert len(history) == (3 if inplace else 2)
    result = result.extend(History.from_chats(CHAT[2:]), inplace=inplace)
    assert result.to_chats() == [*CHAT[:2], {"role": "assistant", "content": "5"}, *CHAT[2:]]


def test_append_and_extend_to_chats_side_by_side() -> None:
    history = History.from_chats([CHAT[:1], CHAT[:2]])
    answers = lazy_stack([History(role="user", content=text, batch_size=()) for text in "ab"])
    history.append(answers)
    assert [chat[-1]["content"] for chat in history.to_chats()] == ["a", "b"]
    more = history.extend(history, inplace=False)
    assert more.to_chats() == [chat + chat for chat in history.to_chats()]
    assert len(history.extend(history, inplace=False, dim=0).to_chats()) == 4


def test_an_incomplete_message_says_so() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "is_complete": False}]
    history = History.from_chats(chat)
    assert history.to_chats() == chat
    assert list(history.is_complete) == [True, False]
    assert History.from_chats(CHAT)[0].is_complete is None


@pytest.mark.llm
def test_apply_chat_template_equals_the_tokenizers() -> None:
    backend = tokenizer("qwen")
    history = History.from_chats([CHAT[:2], CHAT[1:2]])
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
    expected = [backend.apply_chat_template(chat, **options) for chat in (CHAT[:2], CHAT[1:2])]
    assert history.apply_chat_template(tokenizer=backend) == expected
    assert history[1].apply_chat_template(tokenizer=backend) == expected[1]
    tokens = history[0].apply_chat_template(tokenizer=backend, tokenize=True, return_dict=False)
    assert backend.decode(tokens) == expected[0]
    other = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert history[1].apply_chat_template(tokenizer=backend, chat_template=other) == "2 + 3?"


def test_histories_live_in_tensordicts() -> None:
    chat = ChatHistory(prompt=History.from_chats(CHAT[:2]), response=History.from_chats(CHAT[2:3]), batch_size=())
    record = TensorDict({"history": chat}, [])
    stack = lazy_stack([record, TensorDict({"history": ChatHistory(prompt=History.from_chats(CHAT[:1]))}, [])])
    assert stack["history", "prompt"].to_chats() == [CHAT[:2], CHAT[:1]]
    assert stack[0]["history"].response.to_chats() == CHAT[2:3]
    assert pickle.loads(pickle.dumps(record))["history"].prompt.to_chats() == CHAT[:2]
    assert record.clone()["history"].prompt.to_chats() == CHAT[:2]


def test_specs_describe_histories() -> None:
    assert set(History.default_spec().keys()) == {"role", "content"}
    assert tuple(ChatHistory.default_spec((3,))["prompt"].shape) == (3, -1)


@pytest.mark.parametrize(
    ("chats", "error", "match"),
    [
        ("text", TypeError, "list of messages"),
        ([{"content": "a"}], ValueError, "must have the key 'role'.*'content'"),
        ([{"role": "a"}, "b"], TypeError, "a message must be a mapping"),
        ([{"role": "a", "contents": "b"}], ValueError, "may have the keys role, content.*contents"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image", "url": "a.png"}]}],
            ValueError,
            "content: expected text, or parts .*, got a part of type 'image' at place 1. .* describe it in text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], ValueError, "got a part of type 'text' at place 0"),
        ([{"role": "user", "content": [3]}], ValueError, "got a part of type int at place 0"),
    ],
)
def test_what_is_no_chat_is_an_error(chats: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        History.from_chats(chats)


def test_parts_of_text_are_text() -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    chat = [{"role": "user", "content": parts}]
    assert History.from_chats(chat).to_chats() == [CHAT[1]]
    assert History(role=["user"], content=[parts], batch_size=(1,)).to_chats() == [CHAT[1]]
    backend = tokenizer("qwen")
    written = History(role="user", content=parts, batch_size=()).unsqueeze(0).apply_chat_template(tokenizer=backend)
    assert written == History.from_chats(CHAT[1:2]).apply_chat_template(tokenizer=backend)


def test_the_wrong_number_of_dimensions_is_an_error() -> None:
    history = History.from_chats(CHAT)
    with pytest.raises(ValueError, match=r"use append\(\) for one message"):
        history.extend(history[0])
    with pytest.raises(ValueError, match=r"use extend\(\) for several"):
        history.append(history)
    with pytest.raises(ValueError, match="dim must be a batch dimension"):
        history.extend(history, dim=1)


def test_histories_are_found_beside_storages():
    from rollwright import data

    assert data.History is History


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "llama", "gemma"])
def test_text_of_a_template_gives_its_messages(kind: str) -> None:
    backend = tokenizer(kind)
    chat = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "Five."}]
    chat += [{"role": "user", "content": "Sure?\nReally?"}, {"role": "assistant", "content": "Yes."}]
    if kind != "gemma":
        chat.insert(0, {"role": "system", "content": "Be short."})
        chat += [{"role": "tool", "content": "5"}]
    text = backend.apply_chat_template(chat, tokenize=False)
    assert History.from_text(text, tokenizer=backend).to_chats() == chat
    assert History.from_text(text, chat_template=TEMPLATES[kind]).to_chats() == chat


def test_text_of_several_chats_and_what_is_cut_off() -> None:
    text = "<|im_start|>system\nA\nB<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo"
    histories = History.from_text([text, text + "<|im_end|>\n<|im_start|>user\nmore<|im_end|>"])
    assert [len(chat) for chat in histories.to_chats()] == [3, 4]
    last = {"role": "assistant", "content": "Ho"}
    assert histories.to_chats()[0][-1] == last | {"is_complete": False}
    assert histories.to_chats()[1][2] == last
    assert History.from_text(text, chat_template_name="qwen").to_chats()[0]["content"] == "A\nB"
    assert History.from_text(text, tokenizer=tokenizer("qwen")).to_chats() == histories.to_chats()[0]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("no marks", {}),
        ("", {}),
        ("<|im_start|>user\nHi<|im_end|>\nloose", {}),
        ("<|im_start|>user\nHi<|im_start|>assistant\nHo", {}),
        ("<|im_start|>user\nHi<|im_end|>", {"tokenizer": "llama"}),
        ("~user says: [a]\n\n~assistant says: [b]<over>(7)\n\n~user says: [c]", {"tokenizer": "made-up"}),
    ],
)
def test_text_of_another_template_is_an_error(text: str, options: dict[str, str]) -> None:
    options = {key: tokenizer(value) for key, value in options.items()}
    with pytest.raises(ValueError, match=r"text: expected .* got .*Pass the chat template"):
        History.from_text(text, **options)
    with pytest.raises(ValueError, match=r"chat_template_name: expected 'chatml_format' or 'qwen', got 'falcon'"):
        History.from_text(text, chat_template_name="falcon")


def test_samples_of_specs_are_histories() -> None:
    one = History.default_spec().zero()
    assert isinstance(one, History)
    assert one.to_chats() == [{"role": "user", "content": ""}]
    spec = History.default_spec((2, 3))
    for sample in (spec.zero(), spec.rand(), spec.clone().one(), spec[0].zero((2,))):
        assert isinstance(sample, History)
        assert tuple(sample.batch_size) == (2, 3)
    assert spec.is_in(spec.zero())
    chats = ChatHistory.default_spec((2,)).zero()
    assert isinstance(chats, ChatHistory)
    assert isinstance(chats.prompt, History)
    assert tuple(chats.batch_size) == (2,)
