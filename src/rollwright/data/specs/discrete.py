"""Specs of one choice among n outcomes: Categorical and OneHot."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright.data.specs.leaf import DenseSpec
from rollwright.data.specs.shapes import DeviceLike, OutcomeSpace, ShapeLike, as_size
from rollwright.errors import SpecError


class DiscreteSpec(DenseSpec):
    """Base class of Categorical, OneHot and their Multi forms: masks and the two encodings.

    Attributes:
        mask: bool, of the shape of a one-hot sample, True where an outcome is allowed; None: all are.
        start: the number that the environment gives to outcome 0; only ``encode`` and ``to_numpy``
            know of it.
    """

    start: Any

    _are_masked: ClassVar[bool] = False  # whether any spec of this process has had a mask: if not, none is looked for
    _mask: Tensor | None = None
    _find_mask: Callable[[], Tensor | None] | None = None

    @property
    def mask(self) -> Tensor | None:
        """Which outcomes are allowed, bool, of the shape of a one-hot sample; None: all."""
        if self._find_mask is None:
            return self._mask
        return self._find_mask() if DiscreteSpec._are_masked else None

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        self._mask, self._find_mask = mask, None
        if mask is not None:
            DiscreteSpec._are_masked = True

    def follow_mask(self, find: Callable[[], Tensor | None]) -> None:
        """Have the mask that ``find()`` returns, whenever it is read, until one is set; copies have the one of now."""
        self._find_mask = find

    @property
    def follows_mask(self) -> bool:
        """Whether the mask is that of another object, see :meth:`follow_mask`."""
        return self._find_mask is not None

    def held_mask(self) -> Callable[[], None]:
        """A function that makes the mask what it is now, whatever it followed or was set to since."""
        held = self._mask, self._find_mask

        def put_back() -> None:
            self._mask, self._find_mask = held

        return put_back

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mask": self.mask, "_find_mask": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.mask = self.__dict__.pop("mask", self._mask)  # of versions that had no other name for it

    @property
    @abc.abstractmethod
    def _one_hot_shape(self) -> torch.Size:
        """Shape of a one-hot sample."""

    def to_categorical(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """The outcomes' numbers, int64, of a member; a categorical value is returned as it is.

        Args:
            val: ``[*sizes, *self.shape]``.
            safe: check first that it is a member.

        Raises:
            SpecError: ``safe``, and it is none.
        """
        if safe:
            self.assert_is_in(val)
        return self._numbers(val)

    def to_one_hot(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """The bool one-hot form of a member; a one-hot value is returned as it is.

        Args:
            val: ``[*sizes, *self.shape]``.
            safe: check first that it is a member.

        Raises:
            SpecError: there is no such outcome; ``safe``, and it is no member.
        """
        if safe:
            self.assert_is_in(val)
        return self._one_hot(val)

    @abc.abstractmethod
    def _numbers(self, val: Tensor) -> Tensor:
        """The outcomes' numbers, int64, of a member; a categorical value is returned as it is."""

    @abc.abstractmethod
    def _one_hot(self, val: Tensor) -> Tensor:
        """The bool one-hot form of a member; a one-hot value is returned as it is."""

    @abc.abstractmethod
    def to_categorical_spec(self) -> DiscreteSpec:
        """The spec of the same choice as numbers, int64 (itself if it is one)."""

    @abc.abstractmethod
    def to_one_hot_spec(self) -> DiscreteSpec:
        """The spec of the same choice in one-hot form, bool (itself if it is one)."""

    def widths(self) -> tuple[int, ...]:
        """Number of outcomes of each choice along the last dimension of the one-hot form."""
        return (int(self._one_hot_shape[-1]),)

    def update_mask(self, mask: Any) -> None:
        """Set, in place, which outcomes are allowed.

        ``rand`` then draws, ``is_in`` accepts and ``project`` yields allowed outcomes only.

        Args:
            mask: bool, broadcast to the shape of a one-hot sample, or None to allow all.

        Raises:
            ValueError: another shape or dtype, or a choice without any allowed outcome.

        Example:
            >>> spec = Categorical(3)
            >>> spec.update_mask([False, True, False])
            >>> spec.rand()
            tensor(1)
        """
        if mask is None:
            self.mask = None
            return
        shape = [size if size >= 0 else 1 for size in self._one_hot_shape]
        mask = torch.as_tensor(mask, device=self.device)
        remedy = "Give True where an outcome is allowed, at least once for each choice."
        if mask.dtype != torch.bool:
            raise ValueError(
                f"mask: expected dtype bool, got {mask.dtype}. {remedy} An environment of gymnasium gives it by "
                "mask.astype(bool), with Box(0, 1, mask.shape, bool) as its space."
            )
        try:
            mask = mask.expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"mask: expected a shape that broadcasts to {shape}, got {list(mask.shape)}. {remedy}"
            ) from error
        if not all(bool(part.any(-1).all()) for part in mask.split(self.widths(), -1)):
            raise ValueError(f"mask: expected an allowed outcome for each choice, got {mask.tolist()}. {remedy}")
        self.mask = mask

    def _common_mask(self) -> Tensor | None:
        """The mask along the last dimension, where it is the same for the whole batch."""
        if self.mask is None:
            return None
        rows = self.mask.reshape(-1, self.mask.shape[-1])
        if not bool((rows == rows[0]).all()):
            raise ValueError(
                "use_mask: expected a mask that is the same along the batch, got different rows. "
                "Index the spec first and enumerate each element."
            )
        return rows[0]

    def _describe(self) -> list[str]:
        shown = super()._describe()
        return shown if self.mask is None else [*shown, "masked=True"]


def choices(spec: Any) -> dict[NestedKey, DiscreteSpec]:
    """The specs in a Composite that may have a mask, by key."""
    return {key: leaf for key, leaf in spec.leaves().items() if isinstance(leaf, DiscreteSpec)}


class MaskOf:
    """The mask that an action has now in a Composite.

    Args:
        find: returns the Composite, which may be another one each time.
        key: of the action.
    """

    def __init__(self, find: Callable[[], Any], key: NestedKey) -> None:
        self._find, self._key = find, key
        self._spec: Any = None
        self._leaf: Any = None

    def __call__(self) -> Tensor | None:
        """The mask; None: all is allowed."""
        spec = self._find()
        if spec is not self._spec:
            self._spec, self._leaf = spec, spec[self._key]
        return self._leaf.mask  # type: ignore[no-any-return]


def draw(mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Draw one allowed index in the last dimension of ``mask``, for each element of ``[*sizes, *batch]``."""
    n = mask.shape[-1]
    shape = (*sizes, *mask.shape[:-1])
    if not math.prod(shape):
        return torch.zeros(shape, dtype=torch.int64, device=mask.device)
    weights = mask.expand(*shape, n).reshape(-1, n)
    return torch.multinomial(weights.float(), 1).reshape(shape)


def one_hot(index: Tensor, outcomes: Tensor, dtype: torch.dtype) -> Tensor:
    """One-hot form, in a new last dimension; ``outcomes`` is ``arange(n)``."""
    return (index.unsqueeze(-1) == outcomes).to(dtype)


def to_outcomes(val: Tensor, start: Tensor | int, n: Tensor | int, spec: DenseSpec) -> Tensor:
    """The int64 outcomes for an environment's numbers, or a SpecError where one does not exist."""
    if val.is_floating_point() and not bool((val == val.round()).all()):
        raise SpecError(f"value: expected whole numbers for {spec!r}, got {val.tolist()}. Round it first.")
    outcomes = val.long() - start
    if not bool(((outcomes >= 0) & (outcomes < n)).all()):
        raise SpecError(
            f"value: expected outcomes that exist in {spec!r}, got {val.tolist()}. "
            "Correct the value, or the spec's number of outcomes."
        )
    return outcomes


def check_n(n: Any) -> int:
    """The number of outcomes as an int, at least one."""
    if isinstance(n, bool) or int(n) != n or n < 1:
        raise ValueError(f"n: expected a whole number of outcomes, at least 1, got {n!r}. Count the outcomes.")
    return int(n)


def check_capacity(n: int, dtype: torch.dtype) -> None:
    """Raise ValueError where a dtype cannot count ``n`` outcomes."""
    most = 2 if dtype == torch.bool else n if dtype.is_floating_point else torch.iinfo(dtype).max + 1
    if n > most:
        raise ValueError(f"dtype: expected one that can count {n} outcomes, got {dtype}. Use torch.int64.")


class SingleChoice(DiscreteSpec):
    """Base class of Categorical and OneHot: one number of outcomes for all elements."""

    _fields = ("n", "start")
    _tensors = ("mask",)
    n: int

    @property
    def space(self) -> OutcomeSpace:
        """The number of outcomes."""
        return OutcomeSpace(self.n)

    def cardinality(self) -> int:
        """The number of outcomes."""
        return self.n

    def _describe(self) -> list[str]:
        return [text for text in super()._describe() if text != "start=0"]


class Categorical(SingleChoice):
    """One of ``n`` outcomes, as a number from 0 to ``n - 1``.

    Args:
        n: number of outcomes.
        shape: shape of a sample: one choice for each element.
        device: device of the tensors.
        dtype: dtype of the tensors; ``torch.bool`` needs ``n <= 2``.
        mask: bool ``[*shape, n]`` or broadcast to it, True where an outcome is allowed.
        start: the number that the environment gives to outcome 0 (see :class:`DiscreteSpec`).

    Example:
        >>> spec = Categorical(3, shape=(2,))
        >>> spec
        Categorical(n=3, shape=[2], dtype=int64, device=cpu)
        >>> spec.is_in(torch.tensor([0, 2])), spec.is_in(torch.tensor([0, 3]))
        (True, False)
        >>> spec.to_one_hot(torch.tensor([0, 2])).int()
        tensor([[1, 0, 0],
                [0, 0, 1]], dtype=torch.int32)
    """

    def __init__(
        self,
        n: int,
        shape: ShapeLike = (),
        device: DeviceLike = None,
        dtype: torch.dtype = torch.long,
        mask: Any = None,
        *,
        start: int = 0,
    ) -> None:
        super().__init__(shape, device, dtype)
        self.n = check_n(n)
        self.start = int(start)
        self.update_mask(mask)
        self.prepare()

    def prepare(self) -> None:
        """Compute what depends on the parameters; called when one has changed."""
        check_capacity(self.n, self.dtype)
        self._outcomes = torch.arange(self.n, device=self.device)

    @property
    def _one_hot_shape(self) -> torch.Size:
        return torch.Size((*self.shape, self.n))

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All outcomes, ``[n, *self.shape]``."""
        values = self._outcomes
        mask = self._common_mask() if use_mask else None
        if mask is not None:
            values = values[mask]
        return values.to(self.dtype).view(-1, *(1,) * self.ndim).expand(-1, *self._safe_shape)

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """Outcomes drawn uniformly from those allowed."""
        if self.mask is None:
            return torch.randint(self.n, self._sizes(shape), dtype=self.dtype, device=self.device)
        return draw(self.mask, as_size(shape)).to(self.dtype)

    def _in_domain(self, val: Tensor) -> bool:
        if val.dtype != torch.bool and not bool(((val >= 0) & (val < self.n)).all()):
            return False
        if val.is_floating_point() and not bool((val == val.round()).all()):
            return False
        if self.mask is None:
            return self.n > 1 or not bool(val.any())
        allowed = self.mask.to(val.device).expand(*val.shape, self.n)
        return bool(allowed.gather(-1, val.long().unsqueeze(-1)).all())

    def _nearest(self, val: Tensor) -> Tensor:
        number = val.nan_to_num().round() if val.is_floating_point() else val.long()
        number = number.clamp(0, self.n - 1).long()
        if self.mask is None:
            return number
        distance = (self._outcomes.to(val.device) - number.unsqueeze(-1)).abs()
        return distance.masked_fill(~self.mask.to(val.device), self.n).argmin(-1)

    def _domain(self) -> str:
        return f"outcomes 0 to {self.n - 1}" + ("" if self.mask is None else " that the mask allows")

    def _encode(self, val: Tensor) -> Tensor:
        val = self._fit(val, self.shape).to(self.device)
        return to_outcomes(val, self.start, self.n, self).to(self.dtype)

    def _to_numpy(self, val: Tensor) -> Any:
        return (val.long() + self.start if self.start else val).cpu().numpy()

    def _numbers(self, val: Tensor) -> Tensor:
        return val

    def _one_hot(self, val: Tensor) -> Tensor:
        return one_hot(to_outcomes(val, 0, self.n, self), self._outcomes.to(val.device), torch.bool)

    def to_categorical_spec(self) -> Categorical:
        """The spec itself."""
        return self

    def to_one_hot_spec(self) -> OneHot:
        """The bool :class:`OneHot` of shape ``[*self.shape, n]`` with the same mask."""
        return OneHot(self.n, self._one_hot_shape, self.device, mask=self.mask, start=self.start)


class OneHot(SingleChoice):
    """One of ``n`` outcomes, as a vector with a one at the outcome's place.

    Args:
        n: number of outcomes.
        shape: shape of a sample, whose last size is ``n``; default ``(n,)``.
        device: device of the tensors.
        dtype: dtype of the tensors.
        mask: bool, broadcast to ``shape``, True where an outcome is allowed.
        start: the number that the environment gives to outcome 0 (see :class:`DiscreteSpec`).

    ``encode`` takes numbers (``start`` to ``start + n - 1``) and ``to_numpy`` returns them. The last
    dimension cannot be indexed. ``project`` gives the place of the largest allowed entry.

    Example:
        >>> spec = OneHot(3)
        >>> spec.encode(2)
        tensor([False, False,  True])
        >>> spec.project(torch.tensor([0.1, 0.7, 0.2]))
        tensor([False,  True, False])
        >>> int(spec.to_numpy(spec.encode(2)))
        2
    """

    _event_ndim = 1

    def __init__(
        self,
        n: int,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        dtype: torch.dtype = torch.bool,
        mask: Any = None,
        *,
        start: int = 0,
    ) -> None:
        self.n = check_n(n)
        super().__init__((self.n,) if shape is None else shape, device, dtype)
        if self.shape[-1:] != (self.n,):
            raise ValueError(
                f"shape: expected one that ends in n={self.n}, got {list(self.shape)}. Leave it out for [{self.n}]."
            )
        self.start = int(start)
        self.update_mask(mask)
        self.prepare()

    def prepare(self) -> None:
        """Compute what depends on the parameters; called when one has changed."""
        self._outcomes = torch.arange(self.n, device=self.device)

    @property
    def _one_hot_shape(self) -> torch.Size:
        return self.shape

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All outcomes, ``[n, *self.shape]``."""
        values = torch.eye(self.n, dtype=self.dtype, device=self.device)
        mask = self._common_mask() if use_mask else None
        if mask is not None:
            values = values[mask]
        return values.view(-1, *(1,) * (self.ndim - 1), self.n).expand(-1, *self._safe_shape)

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """Outcomes drawn uniformly from those allowed."""
        if self.mask is None:
            index = torch.randint(self.n, self._sizes(shape)[:-1], device=self.device)
        else:
            index = draw(self.mask, as_size(shape))
        return one_hot(index, self._outcomes, self.dtype)

    def _in_domain(self, val: Tensor) -> bool:
        ones = val != 0
        if val.dtype != torch.bool and not bool((val == ones).all()):
            return False
        if self.mask is not None and bool((ones & ~self.mask.to(val.device)).any()):
            return False
        return bool((ones.sum(-1) == 1).all())

    def _nearest(self, val: Tensor) -> Tensor:
        scores = val.to(torch.float64).nan_to_num(posinf=torch.inf, neginf=-1e308)
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask.to(val.device), -torch.inf)
        return one_hot(scores.argmax(-1), self._outcomes.to(val.device), self.dtype)

    def _domain(self) -> str:
        return "exactly one 1 along the last dimension" + ("" if self.mask is None else ", where the mask allows it")

    def _encode(self, val: Tensor) -> Tensor:
        val = self._fit(val, self.shape[:-1]).to(self.device)
        return one_hot(to_outcomes(val, self.start, self.n, self), self._outcomes, self.dtype)

    def _to_numpy(self, val: Tensor) -> Any:
        return (self.to_categorical(val) + self.start).cpu().numpy()

    def _numbers(self, val: Tensor) -> Tensor:
        return val.to(torch.int64).argmax(-1)

    def _one_hot(self, val: Tensor) -> Tensor:
        return val

    def to_categorical_spec(self) -> Categorical:
        """The int64 :class:`Categorical` of shape ``self.shape[:-1]`` with the same mask."""
        return Categorical(self.n, self.shape[:-1], self.device, mask=self.mask, start=self.start)

    def to_one_hot_spec(self) -> OneHot:
        """The spec itself."""
        return self
