"""What is remembered of a template equals what it renders."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.llm_models import END, TEMPLATES, tokenizer

from rollwright.data.llm import ChatTemplate, TokenChain, skeleton
from rollwright.data.llm.verbatim import written_verbatim

pytestmark = pytest.mark.llm

MESSAGE = "{% for m in messages %}BODY{% endfor %}"


@pytest.mark.parametrize(
    ("body", "looked_for"),
    [
        ("{{ m.role + m.content }}", set()),
        ("{{ m['content'] | trim }}", set()),
        ("{{ 'a' ~ m.content.strip() ~ 'b' }}", set()),
        ("{{ m.get('content') }}", set()),
        ("{% if m.content %}{{ m.content }}{% endif %}", set()),
        ("{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}", set()),
        ("{% set c = m.content or '' %}{% if 'x' in c %}{{ c.split('x')[0] }}{% else %}{{ c }}{% endif %}", {"x"}),
        ("{% if m.content.startswith('y') %}{{ m.content | upper }}{% endif %}{{ m.content }}", {"y"}),
        ("{% generation %}{{ m.content }}{% endgeneration %}", set()),
    ],
)
def test_templates_that_write_texts_as_they_are(body: str, looked_for: set[str]) -> None:
    found = written_verbatim(MESSAGE.replace("BODY", body))
    assert found is not None
    assert found.looked_for == looked_for
    assert found.holds("a word")
    assert not any(found.holds(text) for text in ["", " \n", *looked_for])


@pytest.mark.parametrize(
    "body",
    [
        "{{ m }}",
        "{{ m | tojson }}",
        "{{ m.content | upper }}",
        "{{ m.content[:3] }}",
        "{{ m.content | length }}",
        "{{ m.content.split('x')[0] }}",
        "{{ m.content == 'x' }}",
        "{% if 'x' in m.role + m.content %}y{% endif %}",
        "{% if 'x' not in m.content %}y{% endif %}",
        "{% for part in m.content %}{{ part.text }}{% endfor %}",
        "{% for key, value in m.items() %}{{ value }}{% endfor %}",
        "{% set ns = namespace(last=m.content) %}{{ ns.last | length }}",
        "{% macro f(x) %}{{ x | length }}{% endmacro %}{{ f(m.content) }}",
        "{{ strftime_now('%s') }}",
        "{{ messages | map(attribute='content') | join('') | length }}",
        "{% set c = m.content %}{% set d = c + 'x' %}{{ d | replace('ax', 'b') }}",
        "{% broken",
    ],
)
def test_templates_that_may_look_into_texts(body: str) -> None:
    assert written_verbatim(MESSAGE.replace("BODY", body)) is None


def _texts(choice: random.Random) -> str:
    parts = ["five", " ", "\n", "</think>", "<think>", "é", "x", "<|im_end|>", "tool"]
    return "".join(choice.choice(parts) for _ in range(choice.randint(0, 5)))


@pytest.mark.parametrize("history", ["keep", "rewrite"])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_is_remembered_equals_what_is_rendered(kind: str, history: Any) -> None:
    backend = tokenizer(kind)
    shared = TokenChain(backend, {}, history=history)
    remembering = 0
    for seed in range(30):
        choice = random.Random(seed)
        chains = [shared.new(), TokenChain(backend, ChatTemplate(backend), history=history)]
        forget = chains[1]._template  # type: ignore[attr-defined]
        forget.skeletons._verbatim = None
        user = {"role": "user", "content": _texts(choice)}
        for chain in chains:
            chain.open([user])
        for _ in range(choice.randint(1, 4)):
            text = _texts(choice) + (END[kind] if choice.random() < 0.8 else "")
            answer = torch.tensor(backend(text, add_special_tokens=False).input_ids, dtype=torch.int64)
            following = [{"role": "user", "content": _texts(choice)}]
            if kind.startswith("qwen") and choice.random() < 0.5:
                following = [{"role": "tool", "content": _texts(choice)}] * choice.randint(1, 2)
            for chain in chains:
                chain.answer(answer)
                chain.follow(following)
            one, other = chains
            assert one.tokens.tolist() == other.tokens.tolist()
            assert (one.text, one.sequence, one.rewritten) == (other.text, other.sequence, other.rewritten)
        remembering += len(shared._template.skeletons._forms)  # type: ignore[union-attr]
    assert remembering > 0


def test_a_template_is_not_rendered_for_shapes_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = tokenizer("qwen")
    template = ChatTemplate(backend)
    chain = TokenChain(backend, template)
    rendered: list[int] = []
    render = template.render
    monkeypatch.setattr(template, "render", lambda *args, **options: rendered.append(1) or render(*args, **options))
    for number in range(3):
        chain.open([{"role": "user", "content": f"question {number}"}])
        for turn in range(3):
            chain.answer(torch.tensor(backend(f"answer {number} {turn}<|im_end|>").input_ids))
            chain.follow([{"role": "tool", "content": f"result {number} {turn}"}])
        assert len(rendered) == 4 + number  # for the first conversation each turn, for each one its opening


def test_many_shapes_are_forgotten_together_and_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeleton, "_MOST_CHATS", 8)
    backend = tokenizer("qwen")
    template = ChatTemplate(backend)
    chain, fresh = (TokenChain(backend, each) for each in (template, ChatTemplate(backend)))
    fresh._template.skeletons._verbatim = None  # type: ignore[union-attr]
    for number in range(4):
        for each in (chain, fresh):
            each.open([{"role": "user", "content": "?"}])
            for turn in range(3):
                each.answer(torch.tensor(backend(f"answer {turn}<|im_end|>").input_ids))
                each.follow([{"role": "tool" if (number >> turn) & 1 else "user", "content": "and?"}])
        assert chain.tokens.tolist() == fresh.tokens.tolist()
        assert 0 < len(template.skeletons._chats) <= 8
    assert template.skeletons._forms


def test_the_number_of_a_chat_takes_the_same_work_however_long_it_is() -> None:
    backend = tokenizer("qwen")
    template = ChatTemplate(backend)
    shaped: list[Any] = []
    shape = template.skeletons._shape
    template.skeletons._shape = lambda message: shaped.append(message) or shape(message)  # type: ignore[method-assign]
    chain = TokenChain(backend, template)
    for _ in range(2):
        chain.open([{"role": "user", "content": "?"}])
        for _ in range(20):
            shaped.clear()
            chain.answer(torch.tensor(backend("answer<|im_end|>").input_ids))
            chain.follow([{"role": "user", "content": "and?"}])
            assert len(shaped) <= 3
