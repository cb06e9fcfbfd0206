"""VecNorm: normalises by running statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rollwright.envs.on_arrays.columns import at_least, root, total
from rollwright.envs.transforms.base import KeySeq
from rollwright.envs.transforms.entries.running import RunningNorm
from rollwright.envs.transforms.entries.vecnorm_v2 import VecNormV2

__all__ = ["VecNorm"]


BUFFERS = ("weight", "mean", "spread")


class Stats(NamedTuple):
    """Running statistics of an entry, each of its shape below the batch (see :class:`VecNorm`)."""

    weight: torch.Tensor
    mean: torch.Tensor
    spread: torch.Tensor


class VecNorm(RunningNorm):
    r"""Normalises entries by the mean and deviation of what it has seen, older data counting less.

    With :math:`x_1 \dots x_n` the values that one step (or reset) of a batch of ``n`` environments brings,
    and :math:`d` the decay, each element of an entry has a weight, a mean and a spread that follow

    .. math::
        w' = d\,w + n, \qquad
        \mu' = \mu + \frac{1}{w'} \sum_i (x_i - \mu), \qquad
        s' = d\,s + \sum_i (x_i - \mu)(x_i - \mu'),

    so that :math:`\mu` is the mean and :math:`s / w` the variance of all values, one seen :math:`k` steps ago
    weighted by :math:`d^k`. The result is computed with the updated numbers:

    .. math::
        y_i = (x_i - \mu') / \sqrt{\max(s' / w', \epsilon)}.

    In a partial reset only the rows that are reset are counted. The numbers are buffers, part of
    ``state_dict()``; a clone made when there are some shares them.

    Args:
        in_keys: entries to normalise; default ``["observation", "reward"]``. What a reset does not return
            (rewards) is skipped there.
        out_keys: where to write; default: ``in_keys``.
        decay: :math:`d`, above 0 and at most 1.
        eps: the smallest variance to divide by.
        new_api: True: make a :class:`VecNormV2` instead.

    Raises:
        ValueError: ``decay`` or ``eps`` is out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> norm = VecNorm(in_keys=["x"], decay=1.0)
        >>> norm(TensorDict({"x": torch.tensor([1.0, 3.0])}, [2]))["x"]
        tensor([-1.,  1.])
        >>> norm.freeze().loc["x"]
        tensor(2.)
    """

    _statistics = BUFFERS

    def __new__(cls, *args: Any, new_api: bool | None = None, **kwargs: Any) -> Any:
        """The transform, or a :class:`VecNormV2`."""
        return VecNormV2(*args, **kwargs) if new_api else super().__new__(cls)

    def __init__(
        self,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        *,
        decay: float = 0.9999,
        eps: float = 1e-4,
        new_api: bool | None = None,
    ) -> None:
        super().__init__(["observation", "reward"] if in_keys is None else in_keys, out_keys, decay, eps)

    # Statistics -------------------------------------------------------------------------------

    def stats(self, index: int) -> Stats | None:
        """The statistics of an entry, by its place among ``in_keys``; None before it was seen."""
        numbers = self._numbers(index)
        return None if numbers is None else Stats(*numbers)

    def loc_scale(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Mean and deviation, see :class:`RunningNorm`."""
        stats = self.stats(index)
        return None if stats is None else (stats.mean.clone(), self._deviation(stats.weight, stats.spread))

    def _deviation(self, weight: Any, spread: Any) -> Any:
        return root(at_least(spread / weight, self.eps))

    # Data -------------------------------------------------------------------------------------

    def _begun(self, value: torch.Tensor, ndim: int) -> Stats:
        return Stats(*(value.new_zeros(value.shape[ndim:]) for _ in BUFFERS))

    def _scaled(self, numbers: Sequence[Any], value: Any, seen: Any, fresh: torch.Tensor | None, ndim: int) -> Any:
        weight, mean, spread = numbers
        if not self.frozen:
            self._count(weight, mean, spread, seen, fresh, ndim)
        return (value - mean) / self._deviation(weight, spread)

    def _count(self, weight: Any, mean: Any, spread: Any, value: Any, fresh: torch.Tensor | None, ndim: int) -> None:
        rows: Any = math.prod(value.shape[:ndim])
        if fresh is not None:  # a value equal to the mean changes only the weight, which ``rows`` marks
            if not bool(fresh.any()):
                return
            value = torch.where(fresh, value, mean)
            rows = total(fresh.expand(*value.shape[:ndim], *fresh.shape[ndim:]), ndim)
        weight *= self.decay
        weight += rows
        offset = value - mean
        mean += total(offset, ndim) / weight
        spread *= self.decay
        spread += total(offset * (value - mean), ndim)
