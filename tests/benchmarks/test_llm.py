"""The benchmark of language models: its sides do the same work, and it runs without other packages."""

from __future__ import annotations

import pytest
import torch
from benchmarks.counts import CallCounter, OperationCounter
from benchmarks.llm_cases import CHAT, FLAT, Case, check_lengths, generate, make_model, make_tokenizer, prompts_of

from benchmarks import llm
from rollwright.data import ReplayBuffer
from rollwright.modules.llm import Request, Sampling, TransformersEngine

pytest.importorskip("transformers")
pytestmark = pytest.mark.llm


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(tokenizer)


@pytest.mark.parametrize("env", [FLAT, CHAT])
def test_all_sides_answer_the_same_prompts_in_full_length(env, tokenizer, model, monkeypatch):
    case, buffers = Case(env, 3, 5), []
    prompts = prompts_of(case, tokenizer)
    assert len({*map(len, prompts)}) > 1  # unequal: they are padded
    monkeypatch.setattr(
        llm, "ReplayBuffer", lambda storage: buffers.append(ReplayBuffer(storage=storage)) or buffers[0]
    )
    for side in (llm.NATIVE, llm.STORED, llm.PLAIN):
        with llm.collecting(case, side, model, tokenizer) as next_batch:
            batch = next_batch()
            batch = (buffers[0][-3:] if side == llm.STORED else batch).reshape(-1)
        key = ("tokens", "prompt") if env == CHAT else "tokens"
        read = [tokens.tolist() for tokens in batch.get(key, as_list=True)]
        assert [tokens[: len(prompt)] for tokens, prompt in zip(read, prompts, strict=True)] == prompts


def test_generation_by_hand_gives_the_log_probs_of_its_tokens(tokenizer, model):
    prompts = prompts_of(Case(FLAT, 3, 0), tokenizer)
    tokens, log_probs = generate(model, prompts, 6)
    for prompt, answer, found in zip(prompts, tokens, log_probs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(found, logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_token_costs_no_more_operations_than_by_hand(batch, tokenizer, model):
    prompts = prompts_of(Case(FLAT, batch, 0), tokenizer)
    requests = [Request(key, torch.tensor(prompt), key) for key, prompt in enumerate(prompts)]

    def counts(new):
        engine = TransformersEngine(model, tokenizer=tokenizer, sampling=Sampling(max_new_tokens=new))
        found = []
        for call in (lambda: engine.generate(requests), lambda: generate(model, prompts, new)):
            call()
            operations, calls = OperationCounter(), CallCounter()
            with operations:
                call()
            with calls:
                call()
            found.append((operations.operations, calls.events["call"]))
        return torch.tensor(found, dtype=torch.float64)

    ours, by_hand = (counts(33) - counts(17)) / 16  # what happens once for a response, cancels out
    assert ours[0] <= by_hand[0]
    assert ours[1] <= by_hand[1] + 12  # Python calls


def test_answers_of_another_length_are_an_error():
    with pytest.raises(RuntimeError, match=r"expected 2 answers of 3 tokens, got \[3, 2\]"):
        check_lengths([[1, 2, 3], [1, 2]], Case(FLAT, 2, 3))


def test_it_runs_and_writes_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(llm, "CASES", [case for case in llm.CASES if case.new == 16])
    llm.main(["--quick", "--no-peers", "--out", str(tmp_path)])
    text = (tmp_path / "llm.md").read_text()
    assert "LLMEnv, flat: batch 1, 16 new tokens" in text
    assert "not measured: --no-peers" in text
    assert "bytes" in capsys.readouterr().out
