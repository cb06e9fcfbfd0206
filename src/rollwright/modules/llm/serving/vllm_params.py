"""What vLLM is asked for, and what it answers, in its process and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollwright.data.llm.turns import LogProbMode
from rollwright.modules.llm.serving.service import Order, Reply


def check_mode(mode: LogProbMode, given: str, remedy: str) -> None:
    """Check that vLLM gives log-probabilities of a mode.

    Raises:
        ValueError: it gives others.
    """
    wanted = VLLM_MODES[mode]
    if given != wanted:
        raise ValueError(f"log_prob_mode: {mode!r} needs logprobs_mode={wanted!r}, got {given!r}. {remedy}")


def check_prefill(device: str, divides: bool) -> None:
    """Check that vLLM does not divide prompts on a CPU, where that ends its process: each request has a seed.

    Raises:
        ValueError: it may.
    """
    if device == "cpu" and divides:
        raise ValueError(
            "enable_chunked_prefill: expected False on a CPU, got True. There, vLLM's process ends when it divides a "
            "prompt whose request has a seed. Pass enable_chunked_prefill=False, or start the server with "
            "--no-enable-chunked-prefill."
        )


VLLM_MODES: dict[LogProbMode, str] = {"sampled": "processed_logprobs", "raw": "raw_logprobs"}
"""What vLLM calls the modes."""


def sampling_params(order: Order) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``."""
    how = order.sampling
    return {
        "n": 1,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k,
        "min_p": how.min_p,
        "repetition_penalty": how.repetition_penalty,
        "presence_penalty": how.presence_penalty,
        "frequency_penalty": how.frequency_penalty,
        "max_tokens": order.limit,
        "stop": list(how.stop) or None,
        "stop_token_ids": list(order.end_ids),
        "ignore_eos": True,  # those of the model are among the ids
        "seed": order.seed,
        "logprobs": 0,  # of the token that was sampled, and no others
        "detokenize": bool(how.stop),
        "skip_special_tokens": False,
    }


def reply_of(
    order: Order, tokens: list[int], log_probs: list[float], spans: Sequence[tuple[str, int]], reason: str
) -> Reply:
    """The reply of vLLM, with 0 as log-probability of the most probable token where only that is sampled."""
    if order.sampling.temperature == 0 and order.sampling.log_prob_mode == "sampled":
        log_probs = [0.0] * len(tokens)
    return Reply(tokens, log_probs, [*spans] or [(order.salt, len(tokens))], reason)


def ids_in(*found: Any) -> tuple[int, ...]:
    """Ids of tokens, of which each entry may be one, several or None."""
    ids: set[int] = set()
    for entry in found:
        ids.update([entry] if isinstance(entry, int) else entry or [])
    return tuple(sorted(ids))
