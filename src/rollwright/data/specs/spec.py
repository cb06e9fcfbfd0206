"""TensorSpec: the base class of specs, and the shape arithmetic that all of them share."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch

from rollwright._keys import NestedKey
from rollwright.data.specs.shapes import DeviceLike, ShapeLike, star_size


class TensorSpec(abc.ABC):
    """Describes the tensors that an environment or a policy exchanges: shape, dtype, device, domain.

    A spec is a value: methods that change something return a new spec (the exceptions are documented:
    ``update_mask`` of discrete specs, and the mapping methods of :class:`Composite`).

    Attributes:
        shape: shape of one sample; -1 stands for a size that may vary.
        dtype: dtype of the tensors, None where there is no single one.
        device: device of the tensors, None where there is no single one.
        space: the domain, None where there is none.
    """

    shape: torch.Size
    dtype: torch.dtype | None
    device: torch.device | None
    _event_ndim: ClassVar[int] = 0  # trailing dimensions that belong to one value

    # What a subclass supplies -----------------------------------------------------------------

    @abc.abstractmethod
    def rand(self, shape: ShapeLike = ()) -> Any:
        """A random sample, from torch's global generator.

        Args:
            shape: sizes put before the spec's own shape.

        Returns:
            A tensor (a TensorDict for a Composite) of shape ``[*shape, *self.shape]``.
        """

    @abc.abstractmethod
    def zero(self, shape: ShapeLike = ()) -> Any:
        """Zeros of shape ``[*shape, *self.shape]``, whether or not zero lies in the domain."""

    @abc.abstractmethod
    def one(self, shape: ShapeLike = ()) -> Any:
        """Ones of shape ``[*shape, *self.shape]``, whether or not one lies in the domain."""

    @abc.abstractmethod
    def is_in(self, val: Any) -> bool:
        """Whether the spec could have produced ``val``; leading dimensions beyond the spec's are free.

        The device is not compared.
        """

    @abc.abstractmethod
    def assert_is_in(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise where ``val`` does not lie in the spec.

        Args:
            val: the value to check.
            key: what to call the value in the message.

        Raises:
            SpecError: gives the name, what was expected, what came, and what to do.
        """

    @abc.abstractmethod
    def project(self, val: Any) -> Any:
        """The member of the spec nearest to ``val``; ``val`` itself where it is a member.

        Raises:
            SpecError: ``val`` has a shape that does not fit.
        """

    @abc.abstractmethod
    def encode(self, val: Any) -> Any:
        """Turn what an environment returns (arrays, lists, numbers, dicts) into tensors of the spec.

        The result has the spec's shape. Sizes of one may be missing or added: a number fits a spec of
        shape ``[1]``. NumPy data is copied. A tensor that already is a member is returned as it is.
        Bounds are not checked.

        Raises:
            SpecError: the data cannot be a tensor, or its shape does not fit.
        """

    @abc.abstractmethod
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """The inverse of :meth:`encode`: arrays as an environment takes them.

        Args:
            val: a member of the spec.
            safe: check first that it is one.

        Raises:
            SpecError: ``safe`` is True and ``val`` is not a member.
        """

    @abc.abstractmethod
    def type_check(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` where the dtype of ``val`` is not the spec's."""

    @abc.abstractmethod
    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """The same spec with another dtype or on another device (itself where nothing changes)."""

    @abc.abstractmethod
    def clone(self) -> Self:
        """A copy that can be changed without changing this spec."""

    @abc.abstractmethod
    def __eq__(self, other: object) -> bool: ...

    # The shape operations that all others are made of. Specs that hold others call them on these; the first ``ndim``
    # dimensions, at most :attr:`batch_ndim`, are those of the spec that holds them.

    @abc.abstractmethod
    def index_batch(self, idx: Any, ndim: int) -> Self:
        """Index the first ``ndim`` dimensions."""

    @abc.abstractmethod
    def expand_batch(self, batch: torch.Size, ndim: int) -> Self:
        """Expand the first ``ndim`` dimensions to ``batch``, already known to be possible."""

    @abc.abstractmethod
    def reshape_batch(self, batch: torch.Size, ndim: int) -> Self:
        """Reshape the first ``ndim`` dimensions to ``batch``, of the same number of elements."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep specs hashable that define how they compare."""
        super().__init_subclass__(**kwargs)
        cls.__hash__ = TensorSpec.__hash__  # type: ignore[method-assign]

    def __hash__(self) -> int:
        """Of what equal specs have in common, and what does not change when entries are set."""
        return hash((type(self), tuple(self.shape)))

    # The same for all -------------------------------------------------------------------------

    @property
    def space(self) -> Any:
        """The domain, a :class:`~rollwright.data.tensor_specs.Box`; None where there is none."""
        return None

    @property
    def domain(self) -> str | None:
        """``"continuous"``, ``"discrete"``, ``"composite"`` for a Composite, None for what are no numbers."""
        return "discrete"

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def ndimension(self) -> int:
        """Same as :attr:`ndim`."""
        return self.ndim

    def numel(self) -> int:
        """Number of elements of a sample, varying sizes counted as one."""
        return math.prod(self._safe_shape)

    def cardinality(self) -> int | float:
        """Number of possible values, infinity where they cannot be enumerated.

        Dimensions before those of one value do not count: they are thought to hold one value.
        """
        return math.inf

    def enumerate(self, use_mask: bool = False) -> Any:
        """All values of a discrete spec, stacked along a new first dimension.

        Args:
            use_mask: leave out what the mask forbids.

        Raises:
            ValueError: the spec is not discrete, or its mask differs along the batch.
        """
        raise ValueError(f"enumerate: expected a discrete spec, got {self!r}. Draw samples with rand() instead.")

    def sample(self, shape: ShapeLike = ()) -> Any:
        """Same as :meth:`rand`."""
        return self.rand(shape)

    def zeros(self, shape: ShapeLike = ()) -> Any:
        """Same as :meth:`zero`."""
        return self.zero(shape)

    def ones(self, shape: ShapeLike = ()) -> Any:
        """Same as :meth:`one`."""
        return self.one(shape)

    def contains(self, val: Any) -> bool:
        """Same as :meth:`is_in`."""
        return self.is_in(val)

    def memoize_encode(self, mode: bool = True) -> None:  # noqa: B027
        """Accepted for programs of the field, and changes nothing: :meth:`encode` remembers no values."""

    def erase_memoize_cache(self) -> None:  # noqa: B027
        """Clear the cache of :meth:`memoize_encode`."""

    def _project(self, val: Any) -> Any:
        """Same as :meth:`project`, by the name that specs of the field have for it."""
        return self.project(val)

    def clear_device_(self) -> Self:
        """The spec itself, whose device stays: only Composites may be without one."""
        return self

    def cpu(self) -> Self:
        """The spec on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Self:
        """The spec on a CUDA device."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    @property
    def _safe_shape(self) -> torch.Size:
        """The shape with 1 where sizes may vary."""
        return torch.Size([size if size >= 0 else 1 for size in self.shape])

    @property
    def batch_ndim(self) -> int:
        """Leading dimensions that shape operations may touch: all before the first varying one.

        The last dimensions of some specs belong to one value, and do not count.
        """
        shape = self.shape
        return min(shape.index(-1) if -1 in shape else len(shape), len(shape) - self._event_ndim)

    # Shape arithmetic -------------------------------------------------------------------------

    def __getitem__(self, idx: Any) -> Any:
        """The spec of an indexed sample: ``spec[idx].shape == spec.rand()[idx].shape``.

        Dimensions that belong to one value (the last one of OneHot) cannot be indexed.

        Raises:
            IndexError: the index does not fit the other dimensions.
        """
        return self.index_batch(idx, self.batch_ndim)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """One spec for each index along a dimension."""
        dim = self._batch_dim(dim)
        return tuple(self[(slice(None),) * dim + (i,)] for i in range(self.shape[dim]))

    def index_select(self, dim: int, index: Any) -> Self:
        """The spec of a sample of which some indices along a dimension were taken, as ``torch.index_select`` does.

        Raises:
            IndexError: ``index`` does not fit the dimension.
            ValueError: the dimension lies inside one value.
        """
        return self[(slice(None),) * self._batch_dim(dim) + (index,)]  # type: ignore[no-any-return]

    def expand(self, *shape: Any) -> Self:
        """The spec with new leading dimensions, and with dimensions of size one made larger.

        Args:
            shape: the complete new shape; -1 keeps a size.

        Raises:
            ValueError: the shape cannot be expanded to the one given.
        """
        target, ndim = star_size(shape), self.batch_ndim
        old, tail = self.shape[:ndim], self.shape[ndim:]
        split = len(target) - len(tail)
        added = max(split - ndim, 0)
        kept = [was if now == -1 else now for was, now in zip(old, target[added:split], strict=False)]
        batch = (*target[:added], *kept)
        fits = len(kept) == ndim and all(was in (1, now) for was, now in zip(old, kept, strict=True))
        if split < ndim or target[split:] != tail or not fits or min(batch, default=0) < 0:
            raise ValueError(
                f"shape: expected one to which {list(self.shape)} can be expanded, got {list(target)}. "
                f"Let it end in {list(self.shape)}, of which sizes of one may be larger."
            )
        return self.expand_batch(torch.Size(batch), ndim)

    def reshape(self, *shape: Any) -> Self:
        """The spec of a reshaped sample; one size may be -1.

        Raises:
            ValueError: the numbers of elements differ, or a dimension inside one value would change.
        """
        target, ndim = star_size(shape), self.batch_ndim
        tail = self.shape[ndim:]
        split = len(target) - len(tail)
        if split < 0 or target[split:] != tail:
            raise ValueError(
                f"shape: expected one that ends in {list(tail)}, which belongs to one value, got "
                f"{list(target)}. Reshape the dimensions {list(self.shape[:ndim])} only."
            )
        return self.reshape_batch(self._resolve(target[:split]), ndim)

    view = reshape

    def squeeze(self, dim: int | None = None) -> Self:
        """The spec without its dimensions of size one, or without the given one if it has size one."""
        ndim = self.batch_ndim
        batch = list(self.shape[:ndim])
        if dim is None:
            kept = [size for size in batch if size != 1]
        else:
            dim = self._batch_dim(dim)
            kept = batch[:dim] + batch[dim + (batch[dim] == 1) :]
        return self if kept == batch else self.reshape_batch(torch.Size(kept), ndim)

    def unsqueeze(self, dim: int) -> Self:
        """The spec with a new dimension of size one.

        Raises:
            ValueError: the dimension would lie inside one value.
        """
        dim = self._batch_dim(dim, new=1)
        batch = self.shape[: self.batch_ndim]
        return self.reshape_batch(torch.Size((*batch[:dim], 1, *batch[dim:])), self.batch_ndim)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """The spec with the dimensions from ``start_dim`` to ``end_dim`` made one."""
        start, end = self._batch_dim(start_dim), self._batch_dim(end_dim)
        batch = self.shape[: self.batch_ndim]
        sizes = (*batch[:start], math.prod(batch[start : end + 1]), *batch[end + 1 :])
        return self.reshape_batch(torch.Size(sizes), self.batch_ndim)

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """The spec with one dimension split in several; one size may be -1."""
        dim = self._batch_dim(dim)
        batch = self.shape[: self.batch_ndim]
        return self.reshape_batch(self._resolve((*batch[:dim], *sizes, *batch[dim + 1 :])), self.batch_ndim)

    def _batch_dim(self, dim: int, new: int = 0) -> int:
        """``dim`` counted from the front; ``new`` is 1 where it names a dimension to add."""
        ndim = self.batch_ndim
        resolved = dim + self.ndim + new if dim < 0 else dim
        if not 0 <= resolved < ndim + new:
            raise ValueError(
                f"dim: expected a dimension among the first {ndim + new} of shape {list(self.shape)} "
                f"(the others belong to one value), got {dim}."
            )
        return resolved

    def _resolve(self, batch: Sequence[int]) -> torch.Size:
        """The batch shape with its -1 worked out."""
        old = self.shape[: self.batch_ndim]
        try:
            return torch.zeros((), device="cpu").expand(old).reshape(tuple(batch)).shape
        except RuntimeError as error:
            raise ValueError(
                f"shape: expected as many elements as in {list(old)}, got {list(batch)}. {error}"
            ) from error

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let ``torch.stack``, ``torch.squeeze`` and their like work on specs."""
        handler = _torch_functions.get(func)
        return NotImplemented if handler is None else handler(*args, **(kwargs or {}))


def implements(function: Callable[..., Any], handler: Callable[..., Any]) -> None:
    """Let a function of torch call ``handler`` where its argument is a spec."""
    _torch_functions[function] = handler


def _calls(name: str) -> Callable[..., Any]:
    """A function that calls a spec's method of that name."""
    return lambda spec, *args, **kwargs: getattr(spec, name)(*args, **kwargs)


_torch_functions: dict[Callable[..., Any], Callable[..., Any]] = {}
for _name in ("clone", "flatten", "index_select", "reshape", "squeeze", "unbind", "unflatten", "unsqueeze"):
    implements(getattr(torch, _name), _calls(_name))
