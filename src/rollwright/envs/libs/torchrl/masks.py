"""Masks of allowed actions that environments and transforms of TorchRL write into TorchRL's action specs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollwright._keys import NestedKey
from rollwright.data.specs import Composite

__all__ = ["Masks"]


class Masks:
    """Takes masks over from specs of TorchRL.

    Args:
        theirs: action specs of TorchRL, by key.
        ours: the same of this library.
        keys: of the actions.
    """

    def __init__(self, theirs: Any, ours: Composite, keys: Iterable[NestedKey]) -> None:
        pairs = [(theirs[key], ours[key]) for key in keys]
        self._pairs: list[tuple[Any, Any]] = [pair for pair in pairs if all(hasattr(each, _UPDATE) for each in pair)]

    def take(self) -> None:
        """Write what is allowed now into the specs of this library."""
        for theirs, ours in self._pairs:
            if theirs.mask is not None or ours.mask is not None:
                ours.update_mask(theirs.mask)


_UPDATE = "update_mask"
