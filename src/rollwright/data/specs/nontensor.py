"""The spec of data that is no tensor: strings and other objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright.data.specs.leaf import LeafSpec
from rollwright.data.specs.shapes import DeviceLike, ShapeLike, as_device, as_size
from rollwright.errors import SpecError


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
