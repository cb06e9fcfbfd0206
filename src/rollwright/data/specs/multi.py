"""Specs of several choices at once: MultiCategorical and MultiOneHot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollwright.data.specs.discrete import DiscreteSpec, OneHot, check_capacity, draw, one_hot, to_outcomes
from rollwright.data.specs.shapes import DeviceLike, OutcomeSpaces, ShapeLike, as_size


class MultiCategorical(DiscreteSpec):
    """Several choices as numbers: element ``i`` lies between 0 and ``nvec[i] - 1``.

    Args:
        nvec: numbers of outcomes, ``[choices]``, or with more dimensions where they differ along the
            batch.
        shape: shape of a sample, to which ``nvec`` is broadcast; default: that of ``nvec``.
        device: device of the tensors.
        dtype: dtype of the tensors.
        mask: bool ``[*shape[:-1], sum(nvec)]``, True where an outcome is allowed; needs an ``nvec``
            that is the same along the batch.
        start: numbers that the environment gives to the outcomes 0, broadcast as ``nvec`` is.

    The last dimension cannot be indexed.

    Example:
        >>> spec = MultiCategorical([3, 2])
        >>> spec.is_in(torch.tensor([2, 1])), spec.is_in(torch.tensor([1, 2]))
        (True, False)
        >>> spec.cardinality()
        6
    """

    _tensors = ("nvec", "start", "mask")
    _event_ndim = 1
    nvec: Tensor
    start: Tensor

    def __init__(
        self,
        nvec: Any,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        dtype: torch.dtype = torch.int64,
        mask: Any = None,
        *,
        start: Any = 0,
    ) -> None:
        super().__init__(shape, device, dtype)
        numbers = torch.as_tensor(nvec, device=self.device)
        if numbers.is_floating_point() or numbers.dtype == torch.bool or not bool((numbers >= 1).all()):
            raise ValueError(f"nvec: expected whole numbers of outcomes, at least 1, got {nvec!r}.")
        numbers = numbers.long().reshape(numbers.shape or (1,))
        self.shape = numbers.shape if shape is None else self.shape
        try:
            self.nvec = numbers.expand(self._safe_shape)
            self.start = torch.as_tensor(start, dtype=torch.int64, device=self.device).expand(self._safe_shape)
        except RuntimeError as error:
            raise ValueError(
                f"shape: expected one to which nvec of shape {list(numbers.shape)} and start broadcast, "
                f"got {list(self.shape)}. Let it end in {numbers.shape[-1]}."
            ) from error
        self.update_mask(mask)
        self.prepare()

    def prepare(self) -> None:
        """Compute what depends on the parameters; called when one has changed."""
        if self.nvec.numel():
            check_capacity(int(self.nvec.max()), self.dtype)

    def _row(self) -> list[int]:
        """``nvec`` of one element of the batch, where all are equal."""
        rows = self.nvec.reshape(-1, self.shape[-1])
        if not rows.shape[0] or not bool((rows == rows[0]).all()):
            raise ValueError(
                f"nvec: expected the same numbers along the batch for masks, one-hot forms and enumeration, "
                f"got {self.nvec.tolist()}. Index the spec first."
            )
        return [int(n) for n in rows[0].tolist()]

    def widths(self) -> tuple[int, ...]:
        """Number of outcomes of each choice along the last dimension of the one-hot form."""
        return tuple(self._row())

    @property
    def _one_hot_shape(self) -> torch.Size:
        return torch.Size((*self.shape[:-1], sum(self._row())))

    @property
    def space(self) -> OutcomeSpaces:
        """The number of outcomes of each choice; where it differs along the batch, each choice has one for each row."""
        rows = self.nvec.reshape(-1, self.shape[-1])
        same = bool(len(rows)) and bool((rows == rows[0]).all())
        return OutcomeSpaces.from_nvec(rows[0] if same else self.nvec)  # type: ignore[no-any-return]

    def cardinality(self) -> int:
        """The number of combinations."""
        return math.prod(self._row())

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All combinations, ``[combinations, *self.shape]``, the last choice varying fastest."""
        values = [torch.arange(n, device=self.device) for n in self._row()]
        mask = self._common_mask() if use_mask else None
        if mask is not None:
            values = [value[part] for value, part in zip(values, mask.split(self.widths()), strict=True)]
        table = torch.stack([grid.flatten() for grid in torch.meshgrid(*values, indexing="ij")], -1)
        return table.to(self.dtype).view(-1, *(1,) * (self.ndim - 1), len(values)).expand(-1, *self._safe_shape)

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """Outcomes drawn uniformly from those allowed."""
        if self.mask is not None:
            parts = self.mask.split(self.widths(), -1)
            return torch.stack([draw(part, as_size(shape)) for part in parts], -1).to(self.dtype)
        unit = torch.rand(self._sizes(shape), dtype=torch.float64, device=self.device)
        return (unit * self.nvec).long().to(self.dtype)

    def _in_domain(self, val: Tensor) -> bool:
        if not bool(((val >= 0) & (val < self.nvec.to(val.device))).all()):
            return False
        if val.is_floating_point() and not bool((val == val.round()).all()):
            return False
        return self.mask is None or not bool((self.to_one_hot(val) & ~self.mask.to(val.device)).any())

    def _nearest(self, val: Tensor) -> Tensor:
        nvec = self.nvec.to(val.device)
        number = val.nan_to_num().double().round() if val.is_floating_point() else val.long()
        number = torch.minimum(number.clamp(min=0), (nvec - 1).to(number.dtype)).long()
        if self.mask is None:
            return number
        nearest = []
        for choice, part in enumerate(self.mask.to(val.device).split(self.widths(), -1)):
            outcomes = torch.arange(part.shape[-1], device=val.device)
            distance = (outcomes - number[..., choice].unsqueeze(-1)).abs()
            nearest.append(distance.masked_fill(~part, part.shape[-1]).argmin(-1))
        return torch.stack(nearest, -1)

    def _domain(self) -> str:
        allowed = "" if self.mask is None else " that the mask allows"
        return f"outcomes below nvec={_brief(self.nvec)}{allowed}"

    def _encode(self, val: Tensor) -> Tensor:
        val = self._fit(val, self.shape).to(self.device)
        return to_outcomes(val, self.start, self.nvec, self).to(self.dtype)

    def _to_numpy(self, val: Tensor) -> Any:
        if not bool(self.start.any()):
            return val.cpu().numpy()
        return (val.long() + self.start.to(val.device)).cpu().numpy()

    def _numbers(self, val: Tensor) -> Tensor:
        return val

    def _one_hot(self, val: Tensor) -> Tensor:
        outcomes = to_outcomes(val, 0, self.nvec.to(val.device), self)
        parts = [
            one_hot(number, torch.arange(n, device=val.device), torch.bool)
            for number, n in zip(outcomes.unbind(-1), self._row(), strict=True)
        ]
        return torch.cat(parts, -1)

    def to_categorical_spec(self) -> MultiCategorical:
        """The spec itself."""
        return self

    def to_one_hot_spec(self) -> MultiOneHot:
        """The bool :class:`MultiOneHot` of shape ``[*self.shape[:-1], sum(nvec)]`` with the same mask."""
        start = self.start.reshape(-1, self.shape[-1])[0].tolist()
        return MultiOneHot(self._row(), self._one_hot_shape, self.device, mask=self.mask, start=start)

    def _describe(self) -> list[str]:
        shown = [f"nvec={_brief(self.nvec)}"]
        if bool(self.start.any()):
            shown.append(f"start={_brief(self.start)}")
        return shown if self.mask is None else [*shown, "masked=True"]


class MultiOneHot(DiscreteSpec):
    """Several choices in one-hot form, side by side in the last dimension.

    Args:
        nvec: number of outcomes of each choice.
        shape: shape of a sample, whose last size is ``sum(nvec)``; default ``(sum(nvec),)``.
        device: device of the tensors.
        dtype: dtype of the tensors.
        mask: bool, broadcast to ``shape``, True where an outcome is allowed.
        start: numbers that the environment gives to the outcomes 0, one for each choice.

    ``encode`` takes numbers ``[..., choices]`` and ``to_numpy`` returns them. The last dimension
    cannot be indexed.

    Example:
        >>> spec = MultiOneHot([3, 2])
        >>> spec.encode([2, 0]).int()
        tensor([0, 0, 1, 1, 0], dtype=torch.int32)
        >>> spec.to_numpy(spec.encode([2, 0])).tolist()
        [2, 0]
    """

    _fields = ("nvec", "start")
    _tensors = ("mask",)
    _event_ndim = 1

    def __init__(
        self,
        nvec: Sequence[int] | Tensor,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        dtype: torch.dtype = torch.bool,
        mask: Any = None,
        *,
        start: Any = 0,
    ) -> None:
        self.nvec = tuple(int(n) for n in nvec)
        if not self.nvec or min(self.nvec) < 1:
            raise ValueError(f"nvec: expected numbers of outcomes, each at least 1, got {nvec!r}.")
        super().__init__((sum(self.nvec),) if shape is None else shape, device, dtype)
        if self.shape[-1:] != (sum(self.nvec),):
            raise ValueError(
                f"shape: expected one that ends in sum(nvec)={sum(self.nvec)}, got {list(self.shape)}. "
                f"Leave it out for [{sum(self.nvec)}]."
            )
        self.start = tuple(torch.as_tensor(start).expand(len(self.nvec)).tolist())
        self.update_mask(mask)
        self.prepare()

    def prepare(self) -> None:
        """Compute what depends on the parameters; called when one has changed."""
        ends = torch.tensor(self.nvec, device=self.device).cumsum(0)
        self._counts = torch.tensor(self.nvec, device=self.device)
        self._offsets = ends - self._counts  # where each choice begins in the last dimension
        self._starts = torch.tensor(self.start, device=self.device)

    def widths(self) -> tuple[int, ...]:
        """Number of outcomes of each choice along the last dimension of the one-hot form."""
        return self.nvec

    @property
    def _one_hot_shape(self) -> torch.Size:
        return self.shape

    @property
    def space(self) -> OutcomeSpaces:
        """The number of outcomes of each choice."""
        return OutcomeSpaces.from_nvec(torch.tensor(self.nvec))  # type: ignore[no-any-return]

    def cardinality(self) -> int:
        """The number of combinations."""
        return math.prod(self.nvec)

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All combinations, ``[combinations, *self.shape]``, the last choice varying fastest."""
        return self._from_numbers(self.to_categorical_spec().enumerate(use_mask))

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """Outcomes drawn uniformly from those allowed."""
        sizes = as_size(shape)
        if self.mask is None:
            batch = (*sizes, *self._safe_shape[:-1])
            unit = torch.rand(*batch, len(self.nvec), dtype=torch.float64, device=self.device)
            return self._from_numbers((unit * self._counts).long())
        return self._from_numbers(torch.stack([draw(part, sizes) for part in self.mask.split(self.nvec, -1)], -1))

    def _from_numbers(self, numbers: Tensor) -> Tensor:
        """The members for int64 outcomes ``[..., choices]``."""
        out = torch.zeros(*numbers.shape[:-1], self.shape[-1], dtype=self.dtype, device=numbers.device)
        return out.scatter_(-1, numbers + self._offsets.to(numbers.device), 1)

    def _split(self) -> list[OneHot]:
        """The spec of each choice."""
        masks = [None] * len(self.nvec) if self.mask is None else self.mask.split(self.nvec, -1)
        return [
            OneHot(n, (*self.shape[:-1], n), self.device, self.dtype, mask)
            for n, mask in zip(self.nvec, masks, strict=True)
        ]

    def _in_domain(self, val: Tensor) -> bool:
        parts = val.split(self.nvec, -1)
        return all(spec.is_in(part) for spec, part in zip(self._split(), parts, strict=True))

    def _nearest(self, val: Tensor) -> Tensor:
        parts = val.split(self.nvec, -1)
        return torch.cat([spec.project(part) for spec, part in zip(self._split(), parts, strict=True)], -1)

    def _domain(self) -> str:
        allowed = "" if self.mask is None else ", where the mask allows it"
        return f"exactly one 1 in each group of nvec={list(self.nvec)} along the last dimension{allowed}"

    def _encode(self, val: Tensor) -> Tensor:
        val = self._fit(val, torch.Size((*self.shape[:-1], len(self.nvec)))).to(self.device)
        return self._from_numbers(to_outcomes(val, self._starts, self._counts, self))

    def _to_numpy(self, val: Tensor) -> Any:
        return (self.to_categorical(val) + self._starts.to(val.device)).cpu().numpy()

    def _numbers(self, val: Tensor) -> Tensor:
        return torch.stack([part.to(torch.int64).argmax(-1) for part in val.split(self.nvec, -1)], -1)

    def _one_hot(self, val: Tensor) -> Tensor:
        return val

    def to_categorical_spec(self) -> MultiCategorical:
        """The int64 :class:`MultiCategorical` of shape ``[*self.shape[:-1], choices]`` with the same mask."""
        shape = (*self.shape[:-1], len(self.nvec))
        return MultiCategorical(self.nvec, shape, self.device, mask=self.mask, start=self.start)

    def to_one_hot_spec(self) -> MultiOneHot:
        """The spec itself."""
        return self

    def _describe(self) -> list[str]:
        shown = [f"nvec={list(self.nvec)}"]
        if any(self.start):
            shown.append(f"start={list(self.start)}")
        return shown if self.mask is None else [*shown, "masked=True"]


def _brief(numbers: Tensor) -> str:
    """The numbers of one batch element, or of all where they differ."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    return str((rows[0] if len(rows) and bool((rows == rows[0]).all()) else numbers).tolist())
