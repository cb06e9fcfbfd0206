"""Specs from an example of the data."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, is_non_tensor, is_tensor_collection

from rollwright.data.specs.base import TensorSpec
from rollwright.data.specs.composite import Composite
from rollwright.data.specs.nontensor import NonTensor
from rollwright.data.specs.numeric import Unbounded
from rollwright.data.specs.stacks.stack import stack


def make_composite_from_td(data: Any, *, unsqueeze_null_shapes: bool = True, dynamic_shape: bool = False) -> Composite:
    """The Composite of data of which one example is there: shapes, dtypes and devices, without bounds.

    Args:
        data: a TensorDict or tensorclass; one that is lazily stacked gives a stack of Composites.
        unsqueeze_null_shapes: describe numbers without a dimension as of shape ``[1]``.
        dynamic_shape: let the last size of each entry vary, if it is no batch dimension.

    Returns:
        A Composite of the batch size of ``data``.

    Raises:
        TypeError: it is neither.

    Example:
        >>> from tensordict import TensorDict
        >>> make_composite_from_td(TensorDict({"x": torch.zeros(3), "n": {"y": torch.tensor([True])}}))
        Composite(
            x: Unbounded(shape=[3], dtype=float32, device=cpu),
            n: Composite(
                y: Unbounded(shape=[1], dtype=bool, device=cpu),
                shape=[], device=None),
            shape=[], device=None)
    """
    if not is_tensor_collection(data) or is_non_tensor(data):
        raise TypeError(f"data: expected a TensorDict, got {type(data).__name__}: {data!r}. Put it under a key of one.")
    options = {"unsqueeze_null_shapes": unsqueeze_null_shapes, "dynamic_shape": dynamic_shape}
    if isinstance(data, LazyStackedTensorDict):
        return stack([make_composite_from_td(part, **options) for part in data.tensordicts], data.stack_dim)
    entries: dict[str, TensorSpec] = {}
    for name, value in data.items():
        if is_non_tensor(value):
            entries[name] = _of_objects(value)
        elif is_tensor_collection(value):
            entries[name] = make_composite_from_td(value, **options)
        else:
            shape = value.shape or torch.Size((1,) if unsqueeze_null_shapes else ())
            if dynamic_shape and len(value.shape) > data.ndim:
                shape = torch.Size((*shape[:-1], -1))
            entries[name] = Unbounded(shape, value.device, value.dtype)
    return Composite(entries, shape=data.batch_size, device=data.device)


def _of_objects(value: Any) -> NonTensor:
    first = value
    while first.ndim and isinstance(first, NonTensorStack):
        first = first[0]
    return NonTensor(value.batch_size, value.device, first.data, batched=isinstance(value, NonTensorStack))
