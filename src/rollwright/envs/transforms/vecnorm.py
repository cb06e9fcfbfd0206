"""VecNorm and VecNormV2: values normalised by running statistics."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.specs import TensorSpec, Unbounded
from rollwright.data.specs.conversion import numpy_dtype
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry, Rows
from rollwright.envs.columns import ArrayKind, Columns, at_least, cast, root, row_form, total
from rollwright.envs.transforms.base import EntryTransform, KeySeq
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.values import ObservationNorm


class RunningNorm(EntryTransform):
    """Normalises entries by statistics that each value updates, and that can be frozen.

    Args:
        in_keys: entries to normalise; what a reset does not return (rewards) is skipped there.
        out_keys: where to write; default: ``in_keys``.
        decay: weight of what is older by a step, above 0 and at most 1.
        eps: a smallest number to divide by, above 0.
    """

    _restarts = True
    _statistics: ClassVar[tuple[str, ...]]  # names of buffers, less the entry's index: a count, and two as its dtype
    _has_numpy: bool = True  # whether :meth:`_scaled` takes arrays as the transform is set

    def __init__(self, in_keys: KeySeq, out_keys: KeySeq, decay: float, eps: float) -> None:
        super().__init__(in_keys, out_keys)
        if not 0 < decay <= 1:
            raise ValueError(f"decay: expected a number above 0 and at most 1, got {decay}.")
        if not eps > 0:
            raise ValueError(f"eps: expected a number above 0, got {eps}.")
        self.decay = decay
        self.eps = eps
        self.frozen = False
        for index in range(len(self.in_keys)):
            for name in self._statistics:
                self.register_buffer(f"{name}_{index}", None)

    def _numbers(self, index: int) -> tuple[torch.Tensor, ...] | None:
        """The statistics of an entry, by its place among ``in_keys``; None before it was seen."""
        found = tuple(number for name in self._statistics if (number := self._buffers[f"{name}_{index}"]) is not None)
        return found if len(found) == len(self._statistics) else None

    def has_seen(self, index: int) -> bool | None:
        """Whether all of the entry at ``index``, a place among ``in_keys``, was counted; None: it never came."""
        numbers = self._numbers(index)
        return None if numbers is None else bool(numbers[0].all())

    @abstractmethod
    def loc_scale(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What is taken from an entry and what it is divided by; None before it was seen.

        Args:
            index: place among ``in_keys``.

        Returns:
            Tensors of their own, of an entry's shape (below the batch, where rows share statistics).
        """

    @property
    def loc(self) -> TensorDict:
        """What is taken from entries, by ``in_keys``; those seen so far."""
        return TensorDict({key: loc for key, loc, _ in self._all_loc_scale()})

    @property
    def scale(self) -> TensorDict:
        """What entries are divided by, by ``in_keys``; those seen so far."""
        return TensorDict({key: scale for key, _, scale in self._all_loc_scale()})

    def _all_loc_scale(self) -> list[tuple[NestedKey, torch.Tensor, torch.Tensor]]:
        found = [(key, self.loc_scale(index)) for index, key in enumerate(self.in_keys)]
        return [(key, *numbers) for key, numbers in found if numbers is not None]

    def _seen_loc_scale(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self.loc_scale(index)
        if numbers is None:
            raise RuntimeError(
                f"{type(self).__name__} has seen no {self.in_keys[index]!r} yet. Step the environment first."
            )
        return numbers

    def to_observation_norm(self) -> ObservationNorm | Compose:
        """The statistics of now as fixed numbers: an ``ObservationNorm``, a chain of them for several keys.

        Raises:
            RuntimeError: an entry was never seen.
        """
        norms = [
            ObservationNorm(*self._seen_loc_scale(index), [in_key], [out_key], standard_normal=True)
            for index, (in_key, out_key) in enumerate(self._pairs())
        ]
        return norms[0] if len(norms) == 1 else Compose(*norms)

    def denorm(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Values from which those at ``out_keys`` were made, by the statistics of now.

        Returns:
            ``tensordict`` with these at ``in_keys``, in a shallow copy; entries that it lacks are left out.

        Raises:
            RuntimeError: an entry was never seen.
        """
        out = tensordict.copy()
        for index, (in_key, out_key) in enumerate(self._pairs()):
            if (value := tensordict.get(out_key, None)) is not None:
                loc, scale = self._seen_loc_scale(index)
                out.set(in_key, value * scale + loc)
        return out

    def frozen_copy(self) -> Self:
        """A frozen transform with statistics of its own, equal to those of now, on no environment."""
        copy = self.clone()
        for name, buffer in self._buffers.items():
            setattr(copy, name, None if buffer is None else buffer.clone())
        return copy.freeze()

    @abstractmethod
    def _begun(self, value: torch.Tensor, ndim: int) -> tuple[torch.Tensor, ...]:
        """The statistics of an entry that was not seen before; arguments of :meth:`_scaled`."""

    @abstractmethod
    def _scaled(self, numbers: Sequence[Any], value: Any, seen: Any, fresh: torch.Tensor | None, ndim: int) -> Any:
        """Count floating-point numbers in rows that are ``fresh`` (None: in all), and normalise them.

        Args:
            numbers: the buffers :attr:`_statistics`, to be updated in place: clones and other processes may share them.
            value: ``[*batch, ...]``; a tensor, or (where all rows count) an array, as ``numbers`` then are.
            seen: ``value``, without a gradient.
            fresh: bool that broadcasts to ``value``.
            ndim: of the batch.
        """

    def _normalise(self, index: int, value: torch.Tensor, fresh: torch.Tensor | None, ndim: int) -> torch.Tensor:
        if not value.is_floating_point():
            value = value.to(torch.get_default_dtype())
        numbers = self._numbers(index)
        if numbers is None:
            numbers = self._begun(value, ndim)
            names = [f"{name}_{index}" for name in self._statistics]
            self._buffers.update(zip(names, numbers, strict=True))
        scaled: torch.Tensor = self._scaled(numbers, value, value.detach(), fresh, ndim)
        return scaled

    def freeze(self) -> Self:
        """Stop updating the statistics; returns the transform."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Update the statistics again; returns the transform."""
        self.frozen = False
        return self

    # Data -------------------------------------------------------------------------------------

    resets_by_mask = False

    def _normalise_all(self, kind: Any, given: Columns | None, columns: Columns) -> None:
        for index, (in_key, out_key) in enumerate(self._pairs()):
            value = columns.get(in_key, None)
            if value is not None:
                fresh = None if given is None else self._fresh(kind, given, in_key, value)
                columns[out_key] = self._normalise(index, value, fresh, len(kind.batch))

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        self._normalise_all(kind, None, out)

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        self._normalise_all(kind, given, fresh)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Normalise data of any batch size, which count as one step (freeze the transform to avoid that)."""
        self._normalise_all(self._kind_of(tensordict), None, tensordict)
        return tensordict

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        self._needs_all_rows(env)
        return super().on_arrays(env)

    def _change_array(self, index: int, entry: Entry, batch: tuple[int, ...]) -> tuple[Entry, Callable[..., Any]]:
        """See :class:`EntryTransform`; on tensors where some rows are reset, or there are no statistics yet."""
        kind, ndim, is_float = ArrayKind(batch, [entry]), len(batch), entry.dtype.kind == "f"
        names = [f"{name}_{index}" for name in self._statistics]
        held: list[torch.Tensor | None] = [None] * len(names)
        arrays: list[Any] = []
        has_floats = is_float and len(entry.shape) > ndim and self._has_numpy

        def views() -> list[Any]:
            """The statistics as arrays; none where they are not there yet, or of another form."""
            nonlocal held, arrays
            buffers = self._buffers
            now = [buffers[name] for name in names]
            if not all(map(is_, now, held)):
                held = now
                found = [number for number in now if number is not None]
                fits = len(found) == len(names) and all(number.is_contiguous() for number in found)
                arrays = [number.numpy() for number in found] if fits and has_floats else []
                if arrays and {array.dtype for array in arrays[-2:]} != {entry.dtype}:
                    arrays = []
            return arrays

        def call(column: Any, rows: Rows | None = None) -> Any:
            numbers = views() if rows is None or not ndim or rows.all() else None
            if numbers:
                value = np.asarray(column, entry.dtype).reshape(entry.shape) if entry.column else column
                with np.errstate(all="ignore"):  # as torch does
                    result = self._scaled(numbers, value, value, None, ndim)
            else:
                fresh, tensor = None, kind.tensor(0, column)
                if rows is not None and ndim:
                    fresh = kind.flags(rows).reshape(rows.shape + (1,) * (tensor.ndim - ndim))
                result = self._normalise(index, tensor, fresh, ndim).numpy()
            return row_form(result) if entry.column else result

        dtype = entry.dtype if is_float else np.dtype(numpy_dtype(torch.get_default_dtype()))
        return entry.replace(dtype=dtype), call

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        return unbounded_float(spec)

    def __repr__(self) -> str:
        frozen = ", frozen" if self.frozen else ""
        return f"{type(self).__name__}(in_keys={self.in_keys}, decay={self.decay}, eps={self.eps}{frozen})"


def unbounded_float(spec: TensorSpec) -> TensorSpec:
    """A spec of the same shape for any floating-point numbers, of the same dtype where that is one."""
    is_float = spec.dtype is not None and spec.dtype.is_floating_point
    dtype = spec.dtype if is_float else torch.get_default_dtype()
    return Unbounded(spec.shape, device=spec.device, dtype=dtype or torch.float32)


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

    _statistics = Stats._fields

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
        return Stats(*(value.new_zeros(value.shape[ndim:]) for _ in Stats._fields))

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

    _statistics = ("count", "loc", "var")

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
