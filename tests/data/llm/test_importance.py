"""Importance weights: by hand, truncated, masked, by token and by sequence; and what else feeds a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import lazy_stack
from tests.llm_models import model, tokenizer

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import as_list, importance_weights, packed, padded, training_sequences
from rollwright.envs.llm import ChatEnv
from rollwright.envs.llm.transforms import RetrieveLogProb
from rollwright.modules.llm import TransformersWrapper

pytestmark = pytest.mark.llm
NEW = torch.tensor([[0.1, 0.6, 0.9, 0.2], [0.5, 0.5, 0.3, 0.4]]).log()
OLD = torch.tensor([[0.4, 0.5, 0.3, 0.2], [0.5, 0.25, 0.3, 0.2]]).log()
MASK = torch.tensor([[True, True, True, False], [False, True, True, True]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"correction": "none"}, [[0.25, 1.2, 3.0, 0.0], [0.0, 2.0, 1.0, 2.0]]),
        ({}, [[0.25, 1.2, 2.0, 0.0], [0.0, 2.0, 1.0, 2.0]]),
        ({"high": 1.5}, [[0.25, 1.2, 1.5, 0.0], [0.0, 1.5, 1.0, 1.5]]),
        ({"correction": "mask", "low": 0.5, "high": 2.5}, [[0.0, 1.2, 0.0, 0.0], [0.0, 2.0, 1.0, 2.0]]),
        ({"level": "sequence", "high": 3.0}, [[0.9, 0.9, 0.9, 0.0], [0.0, 3.0, 3.0, 3.0]]),
        ({"level": "sequence", "correction": "mask"}, [[0.9, 0.9, 0.9, 0.0], [0.0] * 4]),
    ],
)
def test_weights_by_hand(options: dict[str, Any], expected: list[list[float]]) -> None:
    new = NEW.clone().requires_grad_()
    found = importance_weights(new, OLD, mask=MASK, **options)
    assert torch.allclose(found, torch.tensor(expected), atol=1e-6)
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "clip"}, "correction must be 'truncate' or 'mask' or 'none'; got 'clip'"),
        ({"level": "batch"}, "level must be 'token' or 'sequence'; got 'batch'"),
        ({"low": 1.5}, "low and high must be bounds around 1"),
        ({"mask": MASK[:1]}, r"must be of one shape, .* got \[\(2, 4\), \(2, 4\), \(1, 4\)\]"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        importance_weights(NEW, OLD, **options)


def test_what_the_sampling_weights_give_again_weighs_one_in_all_forms() -> None:
    lm, tok = model(), tokenizer()
    env = ChatEnv.from_dataloader([{"query": "a" * n} for n in range(1, 5)], tokenizer=tok, batch_size=4)
    policy = TransformersWrapper(lm, tokenizer=tok, generate_kwargs={"max_new_tokens": 6})
    with LLMCollector(env, policy, trajs_per_batch=4) as collector:
        batch = collector.next()
    learner = TransformersWrapper(lm, tokenizer=tok, generate=False)
    sequences: Any = lazy_stack(training_sequences(batch))
    mask = padded(sequences, "assistant_mask").bool()
    log_probs = learner.log_prob(sequences, mask_key="assistant_mask")
    weights = importance_weights(log_probs, padded(sequences, "log_probs"), mask=mask)
    assert torch.allclose(weights, mask.float(), atol=1e-4)
    reference = RetrieveLogProb(learner)(sequences)
    key = ("ref_log_probs", "full")
    assert [len(one) for one in as_list(reference, key)] == [len(one) for one in as_list(sequences, "tokens")]
    assert torch.allclose(padded(reference, key), log_probs.detach(), atol=1e-6)
    values, offsets, _ = packed(reference, key)
    sampled, kept = packed(sequences, "log_probs")[0], packed(sequences, "assistant_mask")[0]
    of_packed = importance_weights(values, sampled, mask=kept)
    assert torch.allclose(of_packed, kept.float(), atol=1e-4)
    assert offsets.tolist() == packed(sequences, "tokens")[1].tolist()
