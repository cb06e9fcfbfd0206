"""Specs of one entry: parameters that follow the shape, the checks that dense tensors share, and objects."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection
from torch import Tensor

from rollwright._keys import NestedKey, unravel
from rollwright.data.specs.shapes import DeviceLike, ShapeLike, as_device, as_size, index_leading, index_shape
from rollwright.data.specs.spec import TensorSpec
from rollwright.errors import SpecError


class LeafSpec(TensorSpec):
    """A spec of one entry.

    A subclass lists its parameters: ``_fields`` are compared by value, ``_tensors`` are tensors (or
    None) whose leading dimensions are the spec's batch dimensions, so that every shape operation is
    the same operation on them.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _tensors: ClassVar[tuple[str, ...]] = ()

    def prepare(self) -> None:
        """Compute what follows from the parameters; called whenever one has changed."""

    def replace(
        self,
        *,
        shape: torch.Size | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        tensor_op: Callable[[Tensor], Tensor] | None = None,
    ) -> Self:
        """A copy with some attributes replaced, and an operation applied to every tensor parameter."""
        new = copy.copy(self)
        new.shape = self.shape if shape is None else shape
        new.dtype = self.dtype if dtype is None else dtype
        new.device = self.device if device is None else device
        for name in self._tensors:
            tensor = getattr(self, name)
            if tensor is not None and tensor_op is not None:
                setattr(new, name, tensor_op(tensor))
        new.prepare()
        return new

    def clone(self) -> Self:
        """A copy; tensor parameters are shared, since no method writes into them."""
        return copy.copy(self)

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """The same spec with another dtype or on another device (itself where nothing changes)."""
        if dest is None or dest == self.dtype:
            return self
        if isinstance(dest, torch.dtype):
            return self._to_dtype(dest)
        device = as_device(dest)
        if device == self.device:
            return self
        return self.replace(device=device, tensor_op=lambda tensor: tensor.to(device))

    def _to_dtype(self, dtype: torch.dtype) -> Self:
        return self.replace(dtype=dtype)

    def index_batch(self, idx: Any, ndim: int) -> Self:
        """Index the first ``ndim`` dimensions."""
        shape = index_shape(self.shape[:ndim], idx) + self.shape[ndim:]
        return self.replace(shape=shape, tensor_op=lambda tensor: index_leading(tensor, idx, ndim))

    def expand_batch(self, batch: torch.Size, ndim: int) -> Self:
        """Expand the first ``ndim`` dimensions to ``batch``, already known to be possible."""
        return self.replace(
            shape=batch + self.shape[ndim:],
            tensor_op=lambda tensor: tensor.expand(batch + tensor.shape[ndim:]),
        )

    def reshape_batch(self, batch: torch.Size, ndim: int) -> Self:
        """Reshape the first ``ndim`` dimensions to ``batch``, of the same number of elements."""
        return self.replace(
            shape=batch + self.shape[ndim:],
            tensor_op=lambda tensor: tensor.reshape(batch + tensor.shape[ndim:]),
        )

    def stack_with(self, others: Sequence[TensorSpec], dim: int) -> Self | None:
        """One spec for this one and others, along a new dimension; None where more than tensor parameters differ."""
        if not all(self.same_kind(spec) for spec in others):
            return None
        out = self.unsqueeze(dim).expand_batch(torch.Size((*self.shape[:dim], 1 + len(others))), dim + 1)
        if all(spec == self for spec in others):
            return out
        for name in self._tensors:
            tensors = [getattr(spec, name) for spec in (self, *others)]
            if len({None if tensor is None else tensor.shape for tensor in tensors}) > 1:
                return None
            if tensors[0] is not None:
                setattr(out, name, torch.stack(tensors, dim))
        out.prepare()
        return out

    def same_kind(self, other: TensorSpec) -> bool:
        """Whether the other spec differs in tensor parameters at most."""
        names = ("shape", "dtype", "device", *self._fields)
        return type(self) is type(other) and all(_same(getattr(self, n), getattr(other, n)) for n in names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeafSpec) or not self.same_kind(other):
            return False
        return all(_same(getattr(self, name), getattr(other, name)) for name in self._tensors)

    def _fits(self, shape: torch.Size) -> bool:
        """Whether a value's shape ends in the spec's."""
        return _ends_in(shape, self.shape)

    def __repr__(self) -> str:
        shown = [*self._describe(), f"shape={list(self.shape)}"]
        if self.dtype is not None:
            shown.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
        return f"{type(self).__name__}({', '.join([*shown, f'device={self.device}'])})"

    def _describe(self) -> list[str]:
        """The parameters for :func:`repr`, beside shape, dtype and device."""
        return [f"{name}={getattr(self, name)!r}" for name in self._fields]


def _ends_in(shape: torch.Size, end: torch.Size) -> bool:
    """Whether the last sizes of a shape are those of ``end``, in which -1 stands for any."""
    if len(shape) < len(end):
        return False
    tail = shape[len(shape) - len(end) :]
    return tail == end or all(want in (-1, got) for want, got in zip(end, tail, strict=True))


def _same(left: Any, right: Any) -> bool:
    """Equality that takes tensors and arrays as well."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return bool(np.array_equal(left, right))
    return bool(left == right)


class DenseSpec(LeafSpec):
    """A spec whose values are tensors of one dtype; a subclass supplies the domain."""

    dtype: torch.dtype
    device: torch.device

    def __init__(self, shape: ShapeLike, device: DeviceLike, dtype: torch.dtype) -> None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: expected a torch.dtype, got {dtype!r}. Pass torch.float32 or the like.")
        self.shape = as_size(shape)
        self.device = as_device(device) or torch.get_default_device()
        self.dtype = dtype

    @abc.abstractmethod
    def _in_domain(self, val: Tensor) -> bool:
        """Whether a value of the right shape and dtype lies in the domain."""

    @abc.abstractmethod
    def _nearest(self, val: Tensor) -> Tensor:
        """The nearest member to a value of a fitting shape; its dtype may be any."""

    @abc.abstractmethod
    def _domain(self) -> str:
        """The domain as text, for messages."""

    def zero(self, shape: ShapeLike = ()) -> Tensor:
        """Zeros of shape ``[*shape, *self.shape]``, whether or not zero lies in the domain."""
        return torch.zeros(self._sizes(shape), dtype=self.dtype, device=self.device)

    def one(self, shape: ShapeLike = ()) -> Tensor:
        """Ones of shape ``[*shape, *self.shape]``, whether or not one lies in the domain."""
        return torch.ones(self._sizes(shape), dtype=self.dtype, device=self.device)

    def _sizes(self, shape: ShapeLike) -> tuple[int, ...]:
        return (*as_size(shape), *[size if size >= 0 else 1 for size in self.shape])

    def is_in(self, val: Any) -> bool:
        """Whether ``val`` is a tensor of the dtype whose shape ends in the spec's, in the domain."""
        return isinstance(val, Tensor) and val.dtype == self.dtype and self._fits(val.shape) and self._in_domain(val)

    def assert_is_in(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` where ``val`` does not lie in the spec."""
        if self.is_in(val):
            return
        if not isinstance(val, Tensor):
            got, remedy = f"{type(val).__name__}", "Convert it with spec.encode(value)."
        elif not self._fits(val.shape):
            got, remedy = self._show(val), f"Reshape it so that its shape ends in {list(self.shape)}."
        elif val.dtype != self.dtype:
            got, remedy = self._show(val), f"Convert it with value.to({self.dtype})."
        else:
            got, remedy = f"{self._show(val)}, values {_extent(val)}", "Map it in with spec.project(value)."
        raise SpecError(f"{_name(key)}: expected {self._wanted()}, got {got}. {remedy}")

    def type_check(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` where the dtype of ``val`` is not the spec's."""
        if getattr(val, "dtype", None) != self.dtype:
            got = getattr(val, "dtype", type(val).__name__)
            raise SpecError(
                f"{_name(key)}: expected dtype {self.dtype}, got {got}. Convert it with value.to({self.dtype})."
            )

    def project(self, val: Any) -> Tensor:
        """The member nearest to ``val``; ``val`` itself where it is a member."""
        if self.is_in(val):
            return val  # type: ignore[no-any-return]
        if not isinstance(val, Tensor) or not self._fits(val.shape):
            got = self._show(val) if isinstance(val, Tensor) else type(val).__name__
            raise SpecError(
                f"value: expected a tensor whose shape ends in {list(self.shape)}, got {got}. "
                "Only values are mapped into the spec, not shapes: convert with spec.encode(value) first."
            )
        return self._nearest(val).to(self.dtype)

    def encode(self, val: Any) -> Tensor:
        """Turn an array, a list, a number or a tensor into a tensor of the spec."""
        if isinstance(val, Tensor) and self.is_in(val):
            return val.to(self.device)
        return self._encode(_as_tensor(val, self))

    def _encode(self, val: Tensor) -> Tensor:
        return self._fit(val, self.shape).to(self.device, self.dtype)

    def _fit(self, val: Tensor, shape: torch.Size) -> Tensor:
        """``val`` in the given shape, sizes of one added or left out."""
        if val.ndim == len(shape) and _ends_in(val.shape, shape):
            return val
        if [size for size in val.shape if size != 1] == [size for size in shape if size != 1]:
            return val.reshape(shape)
        raise SpecError(
            f"value: expected the shape {list(shape)}, got {list(val.shape)}, for {self!r}. "
            "Give data of that shape, or change the spec's shape."
        )

    def to_numpy(self, val: Tensor, safe: bool | None = None) -> Any:
        """The array of a tensor of the spec, as an environment takes it."""
        if safe:
            self.assert_is_in(val)
        return self._to_numpy(val.detach())

    def _to_numpy(self, val: Tensor) -> Any:
        # NumPy has no bfloat16.
        return (val.float() if val.dtype == torch.bfloat16 else val).cpu().numpy()

    def _wanted(self) -> str:
        return f"{self.dtype} of shape [..., {', '.join(map(str, self.shape))}] with {self._domain()}".replace(
            ", ]", "]"
        )

    @staticmethod
    def _show(val: Tensor) -> str:
        return f"{val.dtype} of shape {list(val.shape)}"


def _name(key: NestedKey | None) -> str:
    return "value" if key is None else repr(unravel(key))


def _extent(val: Tensor) -> str:
    """The values of a small tensor, the range of a large one."""
    if val.numel() <= 16:
        return str(val.tolist())
    if val.is_floating_point() and val.isnan().any():
        return f"with {int(val.isnan().sum())} NaN"
    low, high = (val.to(torch.float64) if val.is_floating_point() else val.to(torch.int64)).aminmax()
    return f"from {low.item()} to {high.item()}"


def _as_tensor(val: Any, spec: TensorSpec) -> Tensor:
    """A tensor that owns its memory: environments often write into the arrays they returned."""
    if isinstance(val, Tensor):
        return val
    try:
        if isinstance(val, (bool, int, float)):
            return torch.tensor(val)
        return torch.from_numpy(np.array(val, order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"value: expected numbers in an array, a list or a tensor for {spec!r}, got "
            f"{type(val).__name__} ({error}). Use a NonTensor spec for other data."
        ) from error


class NonTensor(LeafSpec):
    """Strings and other objects that no tensor holds.

    Args:
        shape: batch size of the ``NonTensorData`` that carries the object.
        device: device noted on it, None for none.
        example_data: what ``rand``, ``zero`` and ``one`` return.
        batched: make one object for each element of the shape (a ``NonTensorStack``) instead of one
            that stands for all.

    Any object that is neither a tensor nor a TensorDict is a member.

    Example:
        >>> spec = NonTensor(example_data="north")
        >>> spec.rand().data
        'north'
        >>> spec.is_in("south"), spec.is_in(torch.zeros(()))
        (True, False)
        >>> NonTensor((2,), example_data="north", batched=True).rand().tolist()
        ['north', 'north']
    """

    _fields = ("example_data", "batched")

    def __init__(
        self,
        shape: ShapeLike = (),
        device: DeviceLike = None,
        example_data: Any = None,
        batched: bool = False,
    ) -> None:
        self.shape = as_size(shape)
        self.device = as_device(device)
        self.dtype = None
        self.example_data = example_data
        self.batched = batched

    @property
    def domain(self) -> None:
        """None: what it holds are no numbers."""
        return None

    def rand(self, shape: ShapeLike = ()) -> Any:
        """The example, as ``NonTensorData`` or ``NonTensorStack`` of batch size ``[*shape, *self.shape]``."""
        return self._wrap(self.example_data, torch.Size((*as_size(shape), *self._safe_shape)))

    def rebatched(self, shape: torch.Size) -> NonTensor:
        """The same spec with another batch size."""
        return self.replace(shape=shape)

    def zero(self, shape: ShapeLike = ()) -> Any:
        """Same as :meth:`rand`."""
        return self.rand(shape)

    def one(self, shape: ShapeLike = ()) -> Any:
        """Same as :meth:`rand`."""
        return self.rand(shape)

    def _wrap(self, data: Any, batch: torch.Size) -> Any:
        if not self.batched or not batch:
            return NonTensorData(data, batch_size=batch, device=self.device)
        return NonTensorStack(*[self._wrap(data, batch[1:]) for _ in range(batch[0])], stack_dim=0)

    def is_in(self, val: Any) -> bool:
        """Whether ``val`` is an object, or non-tensor data whose batch size ends in the shape."""
        if is_non_tensor(val):
            return self._fits(val.batch_size)
        return not isinstance(val, Tensor) and not is_tensor_collection(val)

    def assert_is_in(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` where ``val`` does not lie in the spec."""
        if not self.is_in(val):
            name = "value" if key is None else repr(key)
            got = f"{type(val).__name__} of shape {list(val.shape)}"
            raise SpecError(
                f"{name}: expected non-tensor data of shape {list(self.shape)}, got {got}. "
                "Describe tensors by another spec, and wrap objects in NonTensorData of that batch size."
            )

    def type_check(self, val: Any, key: NestedKey | None = None) -> None:
        """Do nothing: objects have no dtype."""

    def project(self, val: Any) -> Any:
        """``val``, which must be a member: there is no nearest one."""
        self.assert_is_in(val)
        return val

    def encode(self, val: Any) -> Any:
        """Wrap an object in ``NonTensorData`` of the spec's shape."""
        if is_non_tensor(val):
            self.assert_is_in(val)
            return val
        if isinstance(val, np.str_):
            val = str(val)
        return NonTensorData(val, batch_size=self._safe_shape, device=self.device)

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """The object itself, a nested list where there is one for each element."""
        if safe:
            self.assert_is_in(val)
        return val.data if isinstance(val, NonTensorData) else val.tolist() if is_non_tensor(val) else val

    def _describe(self) -> list[str]:
        example = repr(self.example_data)
        shown = [f"example_data={example if len(example) <= 40 else example[:37] + '...'}"]
        return [*shown, "batched=True"] if self.batched else shown

    def _to_dtype(self, dtype: torch.dtype) -> NonTensor:
        return self
