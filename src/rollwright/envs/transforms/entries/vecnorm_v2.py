"""VecNormV2: normalises by moving averages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.transforms.base import KeySeq
from rollwright.envs.transforms.entries.running import RunningNorm, root_of_array, total

__all__ = ["VecNormV2"]

BUFFERS = ("count", "loc", "var")


class Averages(NamedTuple):
    """Moving averages of an entry, see :class:`VecNormV2`.

    Attributes:
        loc: of the values, of their shape (below the batch, with ``reduce_batch_dims``).
        var: of their squares, of the same shape.
        number: int64, how many values are in them; of the same shape, but for a last dimension of one.
    """

    loc: torch.Tensor
    var: torch.Tensor
    number: torch.Tensor


class VecNormV2(RunningNorm):
    r"""Normalises entries by moving averages of what it has seen.

    With :math:`d` the decay and :math:`x` a value, each element of an entry has averages that follow

    .. math::
        m' = d\,m + (1 - d)\,x, \qquad s' = d\,s + (1 - d)\,x^2,

    (with :math:`d = 1` all values weigh the same), and becomes, after :math:`n` values, with :math:`c = 1 - d^n`,

    .. math::
        y = (x - m' / c) / \max(\sqrt{(s' - m'^2) / c}, \epsilon).

    Each environment of a batch has averages of its own, unless ``reduce_batch_dims``, with which the values of a step
    are averaged over the batch and count as many. In a partial reset only the rows that are reset are counted. The
    averages are buffers, part of ``state_dict()``; a clone made when there are some shares them.

    :class:`VecNorm` differs: it weighs all values of a batch alike, and its variance is about the mean.

    Args:
        in_keys: entries to normalise. What a reset does not return (rewards) is skipped there.
        out_keys: where to write; default: ``in_keys``.
        stateful: True: the averages are kept in the transform. There is no other way here.
        decay: :math:`d`, above 0 and at most 1.
        eps: the smallest deviation to divide by.
        reduce_batch_dims: one set of averages for all environments of a batch.

    Raises:
        ValueError: ``decay`` or ``eps`` is out of range, or ``stateful`` is False.

    Example:
        >>> from tensordict import TensorDict
        >>> norm = VecNormV2(in_keys=["x"], decay=1.0, reduce_batch_dims=True)
        >>> norm(TensorDict({"x": torch.tensor([1.0, 3.0])}, [2]))["x"]
        tensor([-1.,  1.])
        >>> norm.freeze().loc["x"]
        tensor(2.)
    """

    _statistics = BUFFERS

    def __init__(
        self,
        in_keys: KeySeq,
        out_keys: KeySeq = None,
        *,
        stateful: bool = True,
        decay: float = 0.9999,
        eps: float = 1e-4,
        reduce_batch_dims: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, decay, eps)
        if not stateful:
            raise ValueError(
                "stateful: expected True, got False. The averages are kept in the transform; env.state_dict() has "
                "them, and freeze() keeps them as they are."
            )
        self._pairs()
        self.stateful = True
        self.reduce_batch_dims = bool(reduce_batch_dims)
        self._has_numpy = not reduce_batch_dims

    # Averages ---------------------------------------------------------------------------------

    def averages(self, index: int) -> Averages | None:
        """The averages of an entry, by its place among ``in_keys``; None before it was seen."""
        numbers = self._numbers(index)
        if numbers is None:
            return None
        count, loc, var = numbers
        return Averages(loc, var, count)

    def loc_scale(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See :class:`RunningNorm`."""
        averages = self.averages(index)
        return None if averages is None else self._loc_scale(averages)

    def _loc_scale(self, averages: Averages) -> tuple[torch.Tensor, torch.Tensor]:
        loc, var, number = averages
        spread = var - loc * loc
        if self.decay < 1:
            share = self._share(number, loc.dtype)
            loc, spread = loc / share, spread / share
        else:
            loc = loc.clone()
        return loc, spread.clamp_min_(0).sqrt_().clamp_min_(self.eps)  # rounding may leave less than 0

    def _share(self, number: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """:math:`c = 1 - d^n`, rounded from double precision; where :math:`n = 0`, that of 1."""
        if number.device.type == "cpu":
            return torch.from_numpy(np.asarray(self._share_of_array(number.numpy()))).to(dtype)
        return torch.expm1(number.clamp_min(1).double() * math.log(self.decay)).neg_().to(dtype)

    def _share_of_array(self, number: Any) -> Any:
        return -np.expm1(np.maximum(number, 1) * math.log(self.decay))

    def denorm(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The reverse: ``in_keys`` from ``out_keys``, by the numbers of now.

        Returns:
            A shallow copy of ``tensordict``.

        Raises:
            RuntimeError: an entry was never seen.
        """
        changed = tensordict.clone(False)
        for index, (in_key, out_key) in enumerate(self._pairs()):
            loc, scale = self._seen_loc_scale(index)
            value = tensordict.get(out_key, None)
            if value is not None:
                changed.set(in_key, value * scale + loc)
        return changed

    # Data -------------------------------------------------------------------------------------

    def _normalise(self, index: int, value: torch.Tensor, fresh: torch.Tensor | None, ndim: int) -> torch.Tensor:
        if not value.is_floating_point():
            value = value.to(torch.get_default_dtype())
        averages = self.averages(index)
        if averages is None:
            averages = self._begun(value.shape[ndim:] if self.reduce_batch_dims else value.shape, value)
            for name, zeros in zip(("loc", "var", "count"), averages, strict=True):
                self._buffers[f"{name}_{index}"] = zeros
        if not self.frozen:
            if not self.reduce_batch_dims and averages.loc.shape != value.shape:
                raise ValueError(
                    f"VecNormV2: expected data of shape {list(averages.loc.shape)}, which its statistics are of, got "
                    f"{list(value.shape)}. Pass reduce_batch_dims=True, which keeps one for all rows, or freeze() it."
                )
            (self._count_all if self.reduce_batch_dims else self._count_each)(averages, value.detach(), fresh, ndim)
        loc, scale = self._loc_scale(averages)
        return (value - loc) / scale

    def _begun(self, shape: torch.Size, like: torch.Tensor) -> Averages:
        counts = (*shape[:-1], 1) if shape else ()
        return Averages(like.new_zeros(shape), like.new_zeros(shape), like.new_zeros(counts, dtype=torch.int64))

    def _count_each(self, averages: Averages, value: torch.Tensor, fresh: torch.Tensor | None, ndim: int) -> None:
        """Update the averages of each row, in place: clones and other processes may share them."""
        loc, var, count = averages
        count.add_(1 if fresh is None else fresh.expand(count.shape) if count.ndim else fresh.reshape(()))
        weight: float | torch.Tensor = 1 - self.decay
        if self.decay == 1:
            weight = count.clamp_min(1).to(loc.dtype).reciprocal()
        for average, now in ((loc, value), (var, value * value)):
            moved = average + (now - average) * weight
            average.copy_(moved if fresh is None else torch.where(fresh, moved, average))

    def _count_all(self, averages: Averages, value: torch.Tensor, fresh: torch.Tensor | None, ndim: int) -> None:
        """Update the averages that all rows share, in place."""
        loc, var, count = averages
        rows: torch.Tensor = torch.full_like(count, value.shape[:ndim].numel())
        if fresh is not None:
            marks = fresh.expand((*value.shape[:ndim], *count.shape)) if count.ndim else fresh
            rows = total(marks.reshape(*value.shape[:ndim], *count.shape).long(), ndim)
            if not bool(rows.any()):
                return
            value = torch.where(fresh, value, 0)
        count.add_(rows)
        number = rows.to(loc.dtype)
        weight = 1 - self.decay**number if self.decay < 1 else number / count.clamp_min(1)
        some = number.clamp_min(1)
        for average, now in ((loc, value), (var, value * value)):
            average.add_((total(now, ndim) / some - average) * weight)

    def _in_numpy(self, numbers: list[Any], value: Any, ndim: int) -> Any:
        number, loc, var = numbers
        if not self.frozen:
            number += 1
            weight = 1 - self.decay if self.decay < 1 else 1 / number.astype(loc.dtype)
            loc += (value - loc) * weight
            var += (value * value - var) * weight
        spread = var - loc * loc
        if self.decay < 1:
            share = self._share_of_array(number).astype(loc.dtype)
            loc, spread = loc / share, spread / share
        return (value - loc) / np.maximum(root_of_array(np.maximum(spread, 0)), self.eps)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        return self._normalise_arrays(env)
