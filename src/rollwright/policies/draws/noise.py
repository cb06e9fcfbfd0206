"""Random numbers for a whole rollout, drawn in a few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Kind = Literal["exponential", "gumbel", "normal"]

_CHUNK = 2**16  # numbers held at once


@dataclass(frozen=True)
class Noise:
    """Random numbers that one distribution needs at each step.

    Attributes:
        kind: exponential numbers, the same as ``-log(number)``, or standard normal ones.
        shape: of one step.
        dtype: of the numbers.
        device: where they are drawn.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def draw(self, steps: int) -> Tensor:
        """``[steps, *shape]``: on CPU the numbers that one call per step would draw, in that order."""
        rows = torch.empty(steps, *self.shape, dtype=self.dtype, device=self.device)
        if self.kind in ("exponential", "gumbel"):
            rows.exponential_()
            return rows.log_().neg_() if self.kind == "gumbel" else rows
        if self.kind != "normal":
            raise ValueError(f"kind: expected one of {', '.join(get_args(Kind))}, got {self.kind!r}. Add it here.")
        size = torch.Size(self.shape).numel()
        if size % 16 == 0:  # torch fills memory in blocks of 16 where there are as many
            return rows.normal_()
        if size < 16:  # and one by one below that, as it does where memory has gaps
            return torch.empty(*rows.shape, 2, dtype=self.dtype, device=self.device)[..., 0].normal_()
        for row in rows:
            row.normal_()
        return rows


def noise_stream(noises: Sequence[Noise], steps: int, split: Callable[[Tensor], Sequence[Any]]) -> Iterator[Any]:
    """Rows of noise in the order of use: those of the first step, one per distribution, then those of the second.

    Args:
        noises: of each distribution.
        steps: how many steps to prepare for. The stream goes on after them.
        split: makes rows of ``[steps, *shape]``.
    """
    parts = _chunks(noises, steps, split)
    return chain(next(parts), chain.from_iterable(parts))  # the first part is drawn now


def _chunks(noises: Sequence[Noise], steps: int, split: Callable[[Tensor], Sequence[Any]]) -> Iterator[Sequence[Any]]:
    numbers = sum(max(1, torch.Size(noise.shape).numel()) for noise in noises)
    most = max(1, _CHUNK // max(1, numbers))
    left = steps
    while True:
        count = min(most, left) or 1  # no more than are used; past the end, one by one
        left -= min(count, left)
        if len(noises) == 1:
            yield split(noises[0].draw(count))
        else:  # in the order in which single steps would draw
            yield [split(noise.draw(1))[0] for _ in range(count) for noise in noises]
