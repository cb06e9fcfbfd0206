"""The wrapper of vLLM, on a stand-in with vLLM's names."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tests.llm_models import model, tokenizer

from rollwright.data.llm.turns import FinishReason
from rollwright.errors import MissingExtraError
from rollwright.modules.llm import Request, vLLMWrapper

pytestmark = pytest.mark.llm


class SamplingParams:
    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class LLM:
    """Answers with the prompt's last token + 1, + 2, and so on; checks what it gets."""

    def __init__(self, model: str = "", logprobs_mode: str = "processed_logprobs") -> None:
        config = SimpleNamespace(max_model_len=32, get_vocab_size=lambda: 400, logprobs_mode=logprobs_mode)
        self.llm_engine = SimpleNamespace(model_config=config)
        self.calls: list[int] = []
        self.loaded: list[str] = []

    def get_tokenizer(self) -> Any:
        return tokenizer()

    def generate(self, prompts: list[Any], params: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        self.calls.append(len(prompts))
        outputs = []
        for prompt, how in zip(prompts, params, strict=True):
            assert how.logprobs == 0
            assert how.top_k == -1
            assert how.n == 1
            assert isinstance(how.seed, int)
            ids = [prompt["prompt_token_ids"][-1] + place + 1 for place in range(how.max_tokens)]
            steps = [{token: SimpleNamespace(logprob=-0.5)} for token in ids]
            outputs.append(
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps, finish_reason="length")])
            )
        return outputs

    def apply_model(self, function: Any) -> None:
        function(SimpleNamespace(load_weights=lambda pairs: self.loaded.extend(key for key, _ in pairs)))


@pytest.fixture
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams))  # type: ignore[arg-type]


def test_without_vllm_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtraError, match="pip install vllm"):
        vLLMWrapper("any")


@pytest.mark.usefixtures("_vllm")
def test_prompts_are_tokens_and_the_record_is_that_of_transformers() -> None:
    llm = LLM()
    policy = vLLMWrapper(llm, generate_kwargs={"max_new_tokens": 3}, policy_version=5)
    td = policy(TensorDict({"text": TensorDict({"prompt": NonTensorStack("hello", "two plus")}, [2])}, [2]))
    assert llm.calls == [2]
    for row, text in zip(td.unbind(0), ("hello", "two plus"), strict=True):
        ids = tokenizer()(text)["input_ids"]
        assert row["tokens", "full"].tolist() == [*ids, *(ids[-1] + place for place in (1, 2, 3))]
        assert row["log_probs", "response"].tolist() == [-0.5] * 3
        assert row["tokens", "policy_version"].tolist() == [5] * 3
        assert row["finish_reason"] == "length"


@pytest.mark.usefixtures("_vllm")
def test_the_engine_keeps_the_contract() -> None:
    llm = LLM()
    engine = vLLMWrapper(llm, generate_kwargs={"max_new_tokens": 3}).engine
    engine.submit([Request(key, torch.tensor([9]), key) for key in range(3)])
    assert engine.results(0) == []
    engine.cancel([1])
    assert [(c.key, c.finish_reason) for c in engine.results(0)] == [(1, FinishReason.CANCELLED)]
    assert [c.key for c in engine.results()] == [0, 2]
    engine.update_weights(model())
    assert engine.version == 1
    assert "lm_head.weight" in llm.loaded
    with pytest.raises(ValueError, match="outside the vocabulary of 400"):
        engine.submit([Request(0, torch.tensor([400]), 0)])
    engine.pause()
    engine.submit([Request(0, torch.tensor([9]), 0)])
    with pytest.raises(RuntimeError, match="it is paused"):
        engine.results()
    engine.close()
    assert engine.results()[0].finish_reason is FinishReason.CANCELLED


@pytest.mark.usefixtures("_vllm")
def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match=r"needs vllm\.LLM"):
        vLLMWrapper(LLM(), log_prob_mode="raw")
    with pytest.raises(ValueError, match="generate: expected True"):
        vLLMWrapper(LLM(), generate=False)
    with pytest.raises(TypeError, match=r"expected a vllm\.LLM"):
        vLLMWrapper(object())
