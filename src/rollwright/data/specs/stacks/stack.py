"""stack: specs along a new dimension, one spec where they agree and a lazy stack where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch

from rollwright.data.specs.base import TensorSpec, implements
from rollwright.data.specs.composite import Composite
from rollwright.data.specs.leaf import LeafSpec
from rollwright.data.specs.stacks.stacked import Stacked
from rollwright.data.specs.stacks.stackedcomposite import StackedComposite


@overload
def stack(specs: Sequence[Composite], dim: int = 0) -> Composite: ...
@overload
def stack(specs: Sequence[TensorSpec], dim: int = 0) -> TensorSpec: ...
def stack(specs: Sequence[TensorSpec], dim: int = 0) -> TensorSpec:
    """Stack specs along a new dimension; ``torch.stack`` of specs does the same.

    Specs that differ in bounds, masks or nothing give one spec; others a :class:`Stacked`, and
    Composites whose entries differ a :class:`StackedComposite`.

    Args:
        specs: at least one spec; all leaves, or all Composites.
        dim: the new dimension.

    Raises:
        ValueError: nothing to stack, leaves mixed with Composites, or other dtypes, devices or
            numbers of dimensions.

    Example:
        >>> from rollwright.data import Bounded, Unbounded
        >>> stack([Bounded(0.0, 1.0, (3,)), Bounded(0.0, 2.0, (3,))]).high[:, 0]
        tensor([1., 2.])
        >>> stack([Unbounded((3,)), Unbounded((4,))]).shape
        torch.Size([2, -1])
    """
    specs = list(specs)
    if not specs:
        raise ValueError("specs: expected at least one spec to stack, got none.")
    first = specs[0]
    composite = isinstance(first, Composite)
    kinds = {(isinstance(spec, Composite), spec.dtype, spec.device, spec.ndim) for spec in specs}
    if len(kinds) > 1 or (composite and len({spec.shape for spec in specs}) > 1):
        raise ValueError(
            "specs: expected leaves of one dtype, device and number of dimensions, or Composites of one "
            f"shape and device, got {specs!r}. Put different leaves under keys of a Composite."
        )
    dim = dim + first.ndim + 1 if dim < 0 else dim
    if not 0 <= dim <= first.batch_ndim:
        raise ValueError(f"dim: expected a new dimension among the first {first.batch_ndim + 1}, got {dim}.")
    if composite:
        return _stack_composites(specs, dim)
    dense = first.stack_with(specs[1:], dim) if isinstance(first, LeafSpec) else None
    return Stacked(specs, dim) if dense is None else dense


def _stack_composites(specs: Sequence[Any], dim: int) -> Composite:
    first: Composite = specs[0]
    if any(isinstance(spec, StackedComposite) or set(spec) != set(first) for spec in specs):
        return StackedComposite(specs, dim)
    entries: dict[str, TensorSpec | None] = {}
    for name in first:
        found = [spec[name] for spec in specs]
        if any(each is None for each in found):  # only the key is known
            if any(each is not None for each in found):
                return StackedComposite(specs, dim)
            entries[name] = None
            continue
        try:
            entries[name] = stack(found, dim)
        except ValueError:  # entries of one name that are too different even for a lazy stack
            return StackedComposite(specs, dim)
    if any(isinstance(entry, (Stacked, StackedComposite)) for entry in entries.values()):
        return StackedComposite(specs, dim)
    shape = torch.Size((*first.shape[:dim], len(specs), *first.shape[dim:]))
    return first.with_entries(entries, shape)


implements(torch.stack, stack)
