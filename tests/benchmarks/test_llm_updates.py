"""The benchmark of updates: nothing is lost while weights change, and what is wrong in records is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.llm_cases import make_tokenizer

from benchmarks import llm_updates as updates

pytest.importorskip("transformers")
pytestmark = pytest.mark.llm


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_nothing_is_lost_while_weights_change_and_what_is_wrong_is_found() -> None:
    tokenizer = make_tokenizer()
    models = updates.make_models(tokenizer)
    policy = updates.on_transformers(models, tokenizer)
    records: list[Any] = updates.collect(policy, models, tokenizer, updates=8, turns=80, cache="rebuild")
    found = updates.check(records, models, 20)
    assert updates.wrong(found, "rebuild") == []
    assert (found["turns"], found["boundaries"], found["newest version"]) == (80, 60, 8)
    assert found["turns of several versions"] > 0

    found = updates.check([*records[1:], records[-1]], models, 20)
    assert (found["lost"], found["twice"]) == (1, 1)
    assert updates.check(records, models[::-1], 20)["difference"] > 0.1
    first, second = (next(each for each in records if int(each["turn"]) == turn) for turn in (0, 1))
    first["tokens", "full"][0] += 1
    second["masks", "all_assistant_mask"][0] = True
    found = updates.check(records, models, 20)
    assert updates.wrong(found, "rebuild") == ["drifted", "wrong masks", "difference"]
