"""Endless dataloaders of random prompts."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from math import prod
from typing import Any, Self

import torch

_LETTERS = 10


def _size(batch_size: int | Sequence[int]) -> int:
    return batch_size if isinstance(batch_size, int) else prod(batch_size)


class DummyStrDataLoader:
    """Yields ``{"text": [...]}`` with random strings of ten letters, without an end.

    Args:
        batch_size: strings of a batch; 0: ``{"text": string}``.

    Example:
        >>> batch = next(DummyStrDataLoader(2))
        >>> [len(text) for text in batch["text"]]
        [10, 10]
    """

    def __init__(self, batch_size: int | Sequence[int] = 0) -> None:
        self.batch_size = _size(batch_size)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        texts = ["".join(random.choices(string.ascii_lowercase, k=_LETTERS)) for _ in range(max(1, self.batch_size))]
        return {"text": texts if self.batch_size else texts[0]}


class DummyTensorDataLoader:
    """Yields ``{"tokens": ..., "attention_mask": ...}`` with random ids and ones, int64 ``[batch, length]``.

    Args:
        batch_size: prompts of a batch; 0: ``[length]``.
        max_length: tokens of a prompt at most.
        padding: fill prompts of random lengths up with zeros, on the left, where the mask is 0; False: all have
            ``max_length`` tokens.
        vocab_size: ids are less.

    Example:
        >>> next(DummyTensorDataLoader(2, max_length=4))["tokens"].shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        batch_size: int | Sequence[int] = 0,
        max_length: int = 10,
        padding: bool = False,
        vocab_size: int = 10_000,
    ) -> None:
        if max_length < 1 or vocab_size < 2:
            raise ValueError(
                f"max_length and vocab_size: expected at least 1 and 2, got {max_length} and {vocab_size}."
            )
        self.batch_size, self.max_length = _size(batch_size), max_length
        self.padding, self.vocab_size = padding, vocab_size

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        shape = (max(1, self.batch_size), self.max_length)
        tokens, mask = torch.randint(1, self.vocab_size, shape), torch.ones(shape, dtype=torch.int64)
        if self.padding:
            for row in range(shape[0]):
                mask[row, : int(torch.randint(self.max_length, ()))] = 0
        batch = {"tokens": tokens * mask, "attention_mask": mask}
        return batch if self.batch_size else {key: value[0] for key, value in batch.items()}
