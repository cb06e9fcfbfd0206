"""Turns of made-up conversations, for tests of records."""

from __future__ import annotations

from typing import Any

import torch

from rollwright.data.llm import FinishReason, Origin, Turn

__all__ = ["conversation", "turn"]


def turn(number: int = 0, prompt: int = 4, response: int = 3, group: int = 0, **changes: Any) -> Turn:
    """A turn whose tokens count from 0, and whose log-probabilities are minus the tokens."""
    tokens = torch.arange(prompt + response)
    fields: dict[str, Any] = {
        "prompt": [{"role": "user", "content": f"question {number}"}],
        "response": {"role": "assistant", "content": f"answer {number}"},
        "prompt_text": f"user: question {number}\n",
        "response_text": f"answer {number}",
        "tokens": tokens,
        "num_prompt": prompt,
        "log_probs": -tokens[prompt:].float(),
        "log_prob_mode": "sampled",
        "versions": torch.full((response,), 7 + number),
        "version": 7 + number,
        "finish_reason": FinishReason.STOP,
        "reward": float(number),
        "seconds": {"generation": 0.5},
    }
    origin = Origin(index=3, epoch=1, repeat=2, group=group, seed=0)
    return Turn(origin, number, 0, **(fields | changes))


def conversation(*sizes: tuple[int, int], group: int = 0, reward: float = 1.0, sequences: Any = None) -> list[Turn]:
    """Turns whose tokens extend each other: of each, how many tokens precede its answer, and how many it answers."""
    turns: list[Turn] = []
    buffer = torch.arange(1000)
    size = 0
    for number, (added, response) in enumerate(sizes):
        if sequences is not None and number and sequences[number] != sequences[number - 1]:
            size = 0
        prompt = size + added
        size = prompt + response
        one = turn(number, prompt, response, group, reward=0.0)
        one.tokens = buffer[:size]
        one.sequence = 0 if sequences is None else sequences[number]
        if turns:
            turns[-1].next_prompt = buffer[:prompt]
            turns[-1].added = [{"role": "tool", "content": "more"}]
        turns.append(one)
    turns[-1].terminated = True
    turns[-1].reward = reward
    return turns
