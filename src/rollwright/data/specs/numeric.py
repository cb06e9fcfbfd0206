"""Specs of numbers: Bounded, Unbounded and Binary."""

from __future__ import annotations

import math
from abc import ABCMeta
from inspect import signature
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from rollwright.data.specs.leaf import DenseSpec
from rollwright.data.specs.shapes import DeviceLike, IntervalSpace, OutcomeSpace, ShapeLike, as_size
from rollwright.data.specs.spec import TensorSpec


class _Numbers(DenseSpec):
    """Base class of Bounded and Unbounded."""

    @property
    def domain(self) -> str:
        """``"continuous"`` for floating-point and complex dtypes, else ``"discrete"``."""
        return "continuous" if self.dtype.is_floating_point or self.dtype.is_complex else "discrete"


class Bounded(_Numbers):
    """Numbers of which each lies in a closed interval, ``low <= value <= high``.

    Args:
        low: lower bounds, broadcast to ``shape``; may be ``-inf`` for a floating-point dtype.
        high: upper bounds, broadcast to ``shape``; may be ``inf`` for a floating-point dtype.
        shape: shape of a sample; default: that of the bounds, broadcast.
        device: device of the tensors.
        dtype: any floating-point or integer dtype; default: that of bounds given as tensors, else
            torch's default dtype.

    Raises:
        ValueError: bounds that do not fit the shape or the dtype, NaN, or ``low > high``.

    ``rand`` is uniform, upper bound of integers included; where one bound is infinite it adds an
    exponential to the other, where both are it is normal.

    Example:
        >>> spec = Bounded(-1.0, 1.0, shape=(3,))
        >>> spec
        Bounded(low=-1.0, high=1.0, shape=[3], dtype=float32, device=cpu)
        >>> spec.is_in(spec.rand()), spec.is_in(torch.full((3,), 2.0))
        (True, False)
        >>> spec.project(torch.tensor([0.5, 2.0, -7.0]))
        tensor([ 0.5000,  1.0000, -1.0000])
    """

    _tensors = ("low", "high")
    low: Tensor
    high: Tensor

    def __init__(
        self,
        low: Any,
        high: Any,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if dtype is None:
            given = [bound.dtype for bound in (low, high) if isinstance(bound, Tensor)]
            dtype = given[0] if given else torch.get_default_dtype()
        super().__init__(shape, device, dtype)
        if dtype == torch.bool or dtype.is_complex:
            raise ValueError(f"dtype: expected a floating-point or integer dtype, got {dtype}. Use Binary for flags.")
        lows, highs = self._bound("low", low), self._bound("high", high)
        try:
            self.shape = torch.broadcast_shapes(lows.shape, highs.shape) if shape is None else self.shape
            sizes = self._safe_shape
            self.low, self.high = lows.expand(sizes), highs.expand(sizes)
        except RuntimeError as error:
            wanted = "each other" if shape is None else f"shape {list(as_size(shape))}"
            raise ValueError(
                f"low, high: expected bounds that broadcast to {wanted}, got shapes {list(lows.shape)} and "
                f"{list(highs.shape)}. Give one number, or one for each element."
            ) from error
        if not bool((self.low <= self.high).all()):
            raise ValueError(
                f"low, high: expected low <= high everywhere and no NaN, got low={low!r}, high={high!r}. "
                "Swap or correct the bounds."
            )
        self.prepare()

    def _bound(self, name: str, value: Any) -> Tensor:
        """A bound as a tensor of the dtype, with one element where all are equal."""
        try:
            given = torch.as_tensor(value, device=self.device)
            bound = given.to(self.dtype)
            if not self.dtype.is_floating_point and not bool((bound == given).all()):
                raise ValueError(f"{value!r} is not a number of {self.dtype}")
        except (RuntimeError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"{name}: expected bounds that {self.dtype} can hold, got {value!r} ({error}). "
                "Give another dtype or other bounds."
            ) from error
        if bound.numel() and bool((bound == bound.flatten()[0]).all()):
            return bound.flatten()[0].clone().expand(bound.shape)  # a view on one number
        return bound

    def _register_batch_size(self, batch_size: Any) -> None:
        """Nothing: TorchRL's Composites, which may hold this spec, tell their bounded entries their shape."""

    def prepare(self) -> None:
        """Compute what depends on the parameters; called when one has changed."""
        # Bounds without the dimensions along which they repeat: less work for each sample.
        self._low, self._high = _compact(self.low), _compact(self.high)
        self._interval: tuple[int, int] | None = None
        self._narrow = True
        if self.dtype.is_floating_point:
            self._span = self._high - self._low
            self._narrow = bool(self._span.isfinite().all())
        else:
            span = self._high.long() - self._low.long()
            self._span = span.double() + (span < 0) * 2.0**64  # int64 wraps around at 2**63
            if self._low.numel() == self._high.numel() == 1:
                self._interval = int(self._low), int(self._high)

    def _to_dtype(self, dtype: torch.dtype) -> Self:
        return type(self)(self.low, self.high, self.shape, self.device, dtype)

    @property
    def space(self) -> IntervalSpace:
        """The bounds, each of the spec's shape."""
        return IntervalSpace(self.low, self.high)

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """A uniform sample; see the class for infinite bounds."""
        sizes = self._sizes(shape)
        if not self.dtype.is_floating_point:
            return self._rand_integers(sizes)
        unit = torch.rand(sizes, dtype=self.dtype, device=self.device)
        if self._narrow:
            # Rounding may lift the largest samples above the bound.
            return torch.minimum(unit.mul_(self._span).add_(self._low), self._high)
        return self._rand_wide(unit)

    def _rand_wide(self, unit: Tensor) -> Tensor:
        """Samples where a bound is infinite, or where the distance of the bounds overflows."""
        has_low, has_high = self._low.isfinite(), self._high.isfinite()
        low, high = self._low.nan_to_num(posinf=0, neginf=0), self._high.nan_to_num(posinf=0, neginf=0)
        uniform = low * (1 - unit) + high * unit
        tail = torch.empty_like(unit).exponential_()
        one_sided = torch.where(has_low, low + tail, high - tail)
        out = torch.where(has_low & has_high, uniform, one_sided)
        out = torch.where(has_low | has_high, out, torch.randn_like(unit))
        return torch.minimum(torch.maximum(out, self._low), self._high)

    def _rand_integers(self, sizes: tuple[int, ...]) -> Tensor:
        if self._interval is not None:
            low, high = self._interval
            # ``random_`` excludes its upper end, and means the dtype's largest number by None.
            end = None if high == torch.iinfo(self.dtype).max else high + 1
            return torch.empty(sizes, dtype=self.dtype, device=self.device).random_(low, end)
        offset = (torch.rand(sizes, dtype=torch.float64, device=self.device) * (self._span + 1)).floor()
        exact = self._low.long() + offset.clamp(max=2.0**62).long()
        # Where doubles cannot count the interval's numbers: round, then force into the bounds.
        coarse = (self._low.double() + offset).clamp(-(2.0**63), 2.0**63 - 1024).long()
        coarse = torch.minimum(torch.maximum(coarse, self._low.long()), self._high.long())
        return torch.where(self._span < 2.0**53, exact, coarse).to(self.dtype)

    def _in_domain(self, val: Tensor) -> bool:
        low, high = self._bounds_on(val.device)
        if val.is_floating_point():
            return torch.equal(val, torch.clamp(val, low, high))  # NaN is in no interval, and equals nothing
        return bool(((val >= low) & (val <= high)).all())

    def _nearest(self, val: Tensor) -> Tensor:
        low, high = self._bounds_on(val.device)
        if val.is_floating_point():
            val = val.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
            if not self.dtype.is_floating_point:
                # Bring it near the bounds before the conversion, which wraps around.
                val = val.double().round().clamp(low.double(), high.double()).clamp(-(2.0**63), 2.0**63 - 1024).long()
        if not self.dtype.is_floating_point:
            return torch.minimum(torch.maximum(val.long(), low.long()), high.long())
        return torch.clamp(val.to(self.dtype), low, high)

    def _bounds_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._low.device == device:
            return self._low, self._high
        return self._low.to(device), self._high.to(device)

    def _domain(self) -> str:
        return f"values in [{_brief(self._low)}, {_brief(self._high)}]"

    def _describe(self) -> list[str]:
        return [f"low={_brief(self._low)}", f"high={_brief(self._high)}"]


class Unbounded(_Numbers):
    """Numbers without bounds: shape and dtype only.

    Args:
        shape: shape of a sample.
        device: device of the tensors.
        dtype: any dtype; default: torch's default dtype.

    ``rand`` is normal for floating-point dtypes, and uniform over the dtype's range for others.

    Example:
        >>> Unbounded((2,)).zero()
        tensor([0., 0.])
        >>> Unbounded((2,)).is_in(torch.zeros(5, 2))
        True
    """

    def __init__(self, shape: ShapeLike = (1,), device: DeviceLike = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(shape, device, torch.get_default_dtype() if dtype is None else dtype)

    @property
    def space(self) -> IntervalSpace:
        """The smallest and the largest number of the dtype, of the spec's shape."""
        if self.dtype == torch.bool:
            low: float = False
            high: float = True
        else:
            info = torch.finfo(self.dtype) if self.dtype.is_floating_point else torch.iinfo(self.dtype)
            low, high = info.min, info.max
        ends = (torch.tensor(end, dtype=self.dtype, device=self.device) for end in (low, high))
        return IntervalSpace(*(end.expand(self._safe_shape) for end in ends))

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """A normal sample, or one uniform over the dtype's range."""
        sizes = self._sizes(shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(sizes, dtype=self.dtype, device=self.device)
        if self.dtype == torch.bool:
            return torch.randint(2, sizes, dtype=self.dtype, device=self.device)
        return torch.empty(sizes, dtype=self.dtype, device=self.device).random_(torch.iinfo(self.dtype).min, None)

    def _in_domain(self, val: Tensor) -> bool:
        return True

    def _nearest(self, val: Tensor) -> Tensor:
        return val if self.dtype.is_floating_point or not val.is_floating_point() else val.round()

    def _domain(self) -> str:
        return "any values"


class _OfDomain(ABCMeta):
    """Makes a spec of a kind of numbers, and lets ``isinstance`` ask for them: these classes have no instances."""

    @property
    def _base(cls) -> Any:
        return next(base for base in cls.__mro__ if not isinstance(base, _OfDomain))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._base) and cast(TensorSpec, instance).domain == cast(Any, cls).wanted

    def __call__(cls, *args: Any, **options: Any) -> Any:
        wanted, other = cast(Any, cls).wanted, "Discrete"
        if wanted == "discrete":
            other = "Continuous"
            if len(args) < len(signature(cls._base).parameters):  # the last one
                options = {"dtype": torch.int64, **options}
        spec = cls._base(*args, **options)
        if spec.domain != wanted:
            raise ValueError(
                f"dtype: expected one of {cls.__name__}, whose numbers are {wanted}, got {spec.dtype}. "
                f"Use {cls._base.__name__}{other}."
            )
        return spec


class UnboundedContinuous(Unbounded, metaclass=_OfDomain):
    """:class:`Unbounded` of floating-point numbers.

    Args:
        shape: shape of a sample.
        device: device of the tensors.
        dtype: a floating-point or complex dtype; default: torch's default dtype.

    Raises:
        ValueError: another dtype.

    Example:
        >>> UnboundedContinuous((2,))
        Unbounded(shape=[2], dtype=float32, device=cpu)
        >>> isinstance(Unbounded((2,)), UnboundedContinuous), isinstance(Unbounded((2,)), UnboundedDiscrete)
        (True, False)
    """

    wanted: ClassVar[str] = "continuous"


class UnboundedDiscrete(Unbounded, metaclass=_OfDomain):
    """:class:`Unbounded` of whole numbers, or of flags.

    Args:
        shape: shape of a sample.
        device: device of the tensors.
        dtype: an integer dtype, or ``torch.bool``.

    Raises:
        ValueError: another dtype.

    Example:
        >>> UnboundedDiscrete((2,))
        Unbounded(shape=[2], dtype=int64, device=cpu)
    """

    wanted: ClassVar[str] = "discrete"


class BoundedContinuous(Bounded, metaclass=_OfDomain):
    """:class:`Bounded` of floating-point numbers; arguments and errors are those of that class.

    Example:
        >>> BoundedContinuous(-1.0, 1.0, (2,))
        Bounded(low=-1.0, high=1.0, shape=[2], dtype=float32, device=cpu)
    """

    wanted: ClassVar[str] = "continuous"


class BoundedDiscrete(Bounded, metaclass=_OfDomain):
    """:class:`Bounded` of whole numbers; arguments and errors are those of that class.

    Example:
        >>> BoundedDiscrete(0, 5, (2,))
        Bounded(low=0, high=5, shape=[2], dtype=int64, device=cpu)
    """

    wanted: ClassVar[str] = "discrete"


def _compact(tensor: Tensor) -> Tensor:
    """The tensor with one element along each dimension that it was expanded over."""
    if not tensor.numel():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _brief(bound: Tensor) -> str:
    """A bound as a short text: one number, a few, or the range it lies in."""
    values = bound.unique().tolist()
    if len(values) == 1:
        return str(values[0])
    return str(bound.tolist()) if bound.numel() <= 4 else f"{values[0]} to {values[-1]}" if values else "[]"


class Binary(DenseSpec):
    """Zeros and ones, each element free of the others.

    Args:
        n: size of the last dimension, where ``shape`` is not given; must agree with it otherwise.
        shape: shape of a sample.
        device: device of the tensors.
        dtype: dtype of the tensors.

    Example:
        >>> spec = Binary(3)
        >>> spec.is_in(torch.tensor([0, 1, 1], dtype=torch.int8))
        True
        >>> spec.cardinality()
        8
    """

    def __init__(
        self,
        n: int | None = None,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        if n is None and shape is None:
            raise ValueError("n, shape: expected one of them, got neither. Write Binary(n) or Binary(shape=...).")
        super().__init__((int(n or 0),) if shape is None else shape, device, dtype)
        if n is not None and self.shape[-1:] != (n,):
            raise ValueError(f"shape: expected one that ends in n={n}, got {list(self.shape)}. Give shape alone.")

    @property
    def space(self) -> OutcomeSpace:
        """Two outcomes for each element."""
        return OutcomeSpace(2)

    def cardinality(self) -> int:
        """The number of patterns along the last dimension."""
        return int(2 ** math.prod(self._safe_shape[-1:]))

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All patterns of the last dimension, ``[2**shape[-1], *self.shape]``."""
        width = math.prod(self._safe_shape[-1:])
        bits = torch.arange(width - 1, -1, -1, device=self.device)
        patterns = (torch.arange(2**width, device=self.device).unsqueeze(-1) >> bits) & 1
        lead = (1,) * (self.ndim - 1)
        return patterns.to(self.dtype).view(-1, *lead, *self._safe_shape[-1:]).expand(-1, *self._safe_shape)

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """Zeros and ones with equal chance."""
        return torch.randint(2, self._sizes(shape), dtype=self.dtype, device=self.device)

    def _in_domain(self, val: Tensor) -> bool:
        return val.dtype == torch.bool or bool(((val == 0) | (val == 1)).all())

    def _nearest(self, val: Tensor) -> Tensor:
        return val if val.dtype == torch.bool else val > 0.5

    def _domain(self) -> str:
        return "zeros and ones"
