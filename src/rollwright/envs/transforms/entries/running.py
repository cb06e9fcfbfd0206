"""What transforms share that normalise by running statistics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.specs import TensorSpec, Unbounded
from rollwright.data.specs.gymspaces import numpy_dtype
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry, Rows
from rollwright.envs.on_arrays.columns import ArrayKind, Columns, row_form
from rollwright.envs.transforms.base import EntryTransform, KeySeq
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.scaling import ObservationNorm

__all__ = ["RunningNorm"]


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
