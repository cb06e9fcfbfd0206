"""Layouts of the wrapper against those of the environment: both paths take them, and write the same records."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.collectors.llm.test_plain import chats, same, texts, wrapper

from rollwright.collectors.llm import LLMCollector
from rollwright.envs import InitTracker, TransformedEnv

pytestmark = [pytest.mark.llm, pytest.mark.usefixtures("_one_thread")]


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CASES = [
    (make, mode, layout)
    for make, mode, layout in itertools.product(
        [texts, chats], [None, "text", "tokens", "history"], [None, "nested", "flat"]
    )
    if not (mode == "history" and (layout == "flat" or make is texts))
]


@pytest.mark.parametrize("log_probs", [True, False])
@pytest.mark.parametrize(("make", "mode", "layout"), CASES)
def test_both_paths_write_the_records_that_the_wrapper_asks_for(make, mode, layout, log_probs):
    policy = wrapper(input_mode=mode, record_layout=layout, return_log_probs=log_probs)
    with LLMCollector(make(2, prompts=2), policy, dialog_turns_per_batch=2) as collector:
        assert collector.stats()["paths"]["env"].startswith("native")
        native = collector.next()
    nested = layout == "nested" or (layout is None and make is chats)
    keys = set(native[0, 0].keys(True, True))
    assert (("tokens", "response") in keys) == nested
    assert ("tokens_response" in keys) != nested
    assert (("log_probs", "response") in keys or "log_probs" in keys) == log_probs
    env = TransformedEnv(make(2, prompts=2), InitTracker())
    if nested != (make is chats):
        with pytest.raises(ValueError, match=f"record_layout='{layout}': .* Leave record_layout out; or take out"):
            LLMCollector(env, policy, dialog_turns_per_batch=2)
        env.close()
        return
    with LLMCollector(env, policy, dialog_turns_per_batch=2) as collector:
        assert collector.stats()["paths"]["env"].startswith("plain")
        same(native, collector.next(), apart=[("is_init",), ("next", "is_init")])
