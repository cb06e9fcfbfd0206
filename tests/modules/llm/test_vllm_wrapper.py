"""The wrapper of vLLM, around an engine on a service; tests/modules/llm/serving/test_on_vllm.py has those of vLLM."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tests.llm_models import tokenizer
from tests.modules.llm.serving.services import LocalService, lively

from rollwright.collectors.llm import LLMCollector, vLLMUpdater, vLLMUpdaterV2
from rollwright.envs.llm import LLMEnv
from rollwright.errors import MissingExtraError
from rollwright.modules.llm import AsyncVLLM, TransformersEngine, vLLMWrapper
from rollwright.modules.llm.engine import Sampling
from rollwright.modules.llm.sampling import token_log_probs
from rollwright.modules.llm.serving.async_engine import AsyncEngine
from rollwright.weight_update import VLLMWeightSyncScheme

pytestmark = pytest.mark.llm


def policy() -> vLLMWrapper:
    return vLLMWrapper(AsyncEngine(LocalService(lively())), generate_kwargs={"max_new_tokens": 3})


def test_without_vllm_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    for made in (vLLMWrapper, AsyncVLLM):
        with pytest.raises(MissingExtraError, match="pip install vllm"):
            made("any")


def test_prompts_are_tokens_and_the_record_is_that_of_transformers() -> None:
    wrapper = policy()
    wrapper.engine.version = 5
    td = wrapper(TensorDict({"text": TensorDict({"prompt": NonTensorStack("hello", "two plus")}, [2])}, [2]))
    for row, text in zip(td.unbind(0), ("hello", "two plus"), strict=True):
        ids = tokenizer()(text)["input_ids"]
        response = row["tokens", "response"]
        assert row["tokens", "full"].tolist() == [*ids, *response.tolist()]
        with torch.no_grad():
            logits = lively()(row["tokens", "full"][None]).logits[0, len(ids) - 1 : -1]
        assert torch.allclose(row["log_probs", "response"], token_log_probs(logits, response, Sampling()), atol=1e-5)
        assert row["tokens", "policy_version"].tolist() == [5] * 3
        assert row["finish_reason"] == "length"
    wrapper.engine.close()


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="generate: expected True"):
        vLLMWrapper("any", generate=False)
    with pytest.raises(TypeError, match=r"expected the name of a model or a vLLM AsyncLLM, got object. A vllm\.LLM"):
        vLLMWrapper(object())
    engine = TransformersEngine(lively(), tokenizer=tokenizer())
    with pytest.raises(TypeError, match="generate_kwargs: expected None beside a TransformersEngine"):
        vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 3})
    with pytest.raises(TypeError, match="engine_args: expected only with the name of a model"):
        vLLMWrapper(engine, engine_args={"dtype": "float32"})
    with pytest.raises(ValueError, match="num_replicas: expected at least 1, got 0"):
        AsyncVLLM.from_pretrained("any", num_replicas=0)
    with pytest.raises(TypeError, match="vllm_engine: expected an engine"):
        vLLMUpdaterV2(3)


def env() -> LLMEnv:
    rows = [{"text": "one"}, {"text": "two"}]
    return LLMEnv.from_dataloader(rows, tokenizer=tokenizer(), batch_size=1, epochs=None)


def versions(batch: Any) -> set[int]:
    return {int(version) for row in batch.reshape(-1).unbind(0) for version in row["tokens_policy_version"]}


@pytest.mark.parametrize("how", ["directly", "scheme", "updater", "updater of an engine"])
def test_new_weights_reach_the_engine(how: str) -> None:
    options: dict[str, Any] = {"dialog_turns_per_batch": 2, "track_policy_version": True}
    if how == "scheme":  # there are workers
        options |= {"weight_sync_schemes": {"policy": VLLMWeightSyncScheme()}, "num_collectors": 2}
    if how == "updater":
        options["weight_updater"] = vLLMUpdater()
    if how == "updater of an engine":
        options["weight_updater"] = vLLMUpdaterV2(AsyncEngine(LocalService(lively())))
    other = lively(1)
    with LLMCollector(env, policy_factory=policy, **options) as collector:
        assert versions(collector.next()) == {0}
        version = collector.update_policy_weights_(other)
        for _ in range(4):  # batches of workers that were collected before
            batch = collector.next()
            if versions(batch) == {version}:
                break
        assert versions(batch) == {version}
        for row in batch.reshape(-1).unbind(0):
            tokens, response = row["tokens"], row["tokens_response"]
            with torch.no_grad():
                logits = other(tokens[None]).logits[0, len(tokens) - len(response) - 1 : -1]
            assert torch.allclose(row["log_probs"], token_log_probs(logits, response, Sampling()), atol=1e-4)
