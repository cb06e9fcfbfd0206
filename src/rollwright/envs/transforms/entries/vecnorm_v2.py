"""VecNormV2: normalises by moving averages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright.envs.on_arrays.columns import at_least, cast, root, total
from rollwright.envs.transforms.base import KeySeq
from rollwright.envs.transforms.entries.running import RunningNorm

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
        """What is subtracted from an entry and what it is divided by; None before the entry was seen."""
        numbers = self._numbers(index)
        if numbers is None:
            return None
        loc, scale = self._loc_scale(*numbers)
        return loc.clone(), scale

    def _loc_scale(self, number: Any, loc: Any, var: Any) -> tuple[Any, Any]:
        spread = var - loc * loc
        if self.decay < 1:
            share = cast(self._share(number), loc.dtype)
            loc, spread = loc / share, spread / share
        return loc, at_least(root(at_least(spread, 0)), self.eps)  # rounding may leave less than 0

    def _share(self, number: Any) -> Any:
        """:math:`c = 1 - d^n` in double precision; where :math:`n = 0`, that of 1."""
        if not isinstance(number, torch.Tensor):
            return -np.expm1(np.maximum(number, 1) * math.log(self.decay))
        if number.device.type == "cpu":
            return torch.from_numpy(np.asarray(self._share(number.numpy())))
        return -torch.expm1(number.clamp_min(1).double() * math.log(self.decay))

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
        numbers = self._numbers(index)
        if numbers is not None and not self.frozen and not self.reduce_batch_dims and numbers[1].shape != value.shape:
            raise ValueError(
                f"VecNormV2: expected data of shape {list(numbers[1].shape)}, which its statistics are of, got "
                f"{list(value.shape)}. Pass reduce_batch_dims=True, which keeps one for all rows, or freeze() it."
            )
        return super()._normalise(index, value, fresh, ndim)

    def _begun(self, value: torch.Tensor, ndim: int) -> tuple[torch.Tensor, ...]:
        shape = value.shape[ndim:] if self.reduce_batch_dims else value.shape
        counts = (*shape[:-1], 1) if shape else ()
        return value.new_zeros(counts, dtype=torch.int64), value.new_zeros(shape), value.new_zeros(shape)

    def _scaled(self, numbers: Sequence[Any], value: Any, seen: Any, fresh: torch.Tensor | None, ndim: int) -> Any:
        number, loc, var = numbers
        if not self.frozen:
            (self._count_all if self.reduce_batch_dims else self._count_each)(number, loc, var, seen, fresh, ndim)
        loc, scale = self._loc_scale(number, loc, var)
        return (value - loc) / scale

    def _count_each(self, number: Any, loc: Any, var: Any, value: Any, fresh: torch.Tensor | None, ndim: int) -> None:
        """Update the averages of each row."""
        if fresh is None:
            number += 1
        else:
            number += fresh.expand(number.shape) if number.ndim else fresh.reshape(())
        weight = 1 - self.decay if self.decay < 1 else 1 / cast(at_least(number, 1), loc.dtype)
        for average, now in ((loc, value), (var, value * value)):
            moved = (now - average) * weight
            average += moved if fresh is None else torch.where(fresh, moved, 0)

    def _count_all(
        self, count: Any, loc: Any, var: Any, value: torch.Tensor, fresh: torch.Tensor | None, ndim: int
    ) -> None:
        """Update the averages that all rows share."""
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
