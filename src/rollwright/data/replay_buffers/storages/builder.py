"""TensorDictBuilder: builds TensorDicts of known entries, quickly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict

from rollwright._keys import NestedKey, as_tuple
from rollwright.data.unchecked import unchecked_td


class TensorDictBuilder:
    """Makes TensorDicts of the same keys from lists of tensors.

    What the constructor of ``TensorDict`` finds out and tests each time (how keys are nested, that shapes begin with
    the batch size) is known here. That is most of the cost of a small batch.

    Args:
        keys: of the entries, in the order in which tensors will come.

    Example:
        >>> builder = TensorDictBuilder(["a", ("b", "c")])
        >>> td = builder.build([torch.zeros(3), torch.ones(3, 2)], (3,), torch.device("cpu"))
        >>> td["b", "c"].shape, td.batch_size
        (torch.Size([3, 2]), torch.Size([3]))
    """

    def __init__(self, keys: Iterable[NestedKey]) -> None:
        paths = [as_tuple(key) for key in keys]
        above = sorted({path[:depth] for path in paths for depth in range(len(path))}, key=len)
        places = {path: number for number, path in enumerate(above)}
        self._count = max(len(above), 1)
        self._entries = [(places[path[:-1]], path[-1]) for path in paths]
        inner = reversed(above[1:])  # the deepest first, so that each is whole when it goes into the one above
        self._inner = [(places[path], places[path[:-1]], path[-1]) for path in inner]

    def build(self, values: Iterable[torch.Tensor], batch: tuple[int, ...], device: torch.device) -> TensorDict:
        """A TensorDict ``[*batch]``.

        Args:
            values: ``[*batch, ...]`` each, on ``device``.
            batch: batch size.
            device: of the values.
        """
        batch_size = torch.Size(batch)
        levels: list[dict[Any, Any]] = [{} for _ in range(self._count)]
        for (level, name), value in zip(self._entries, values, strict=True):
            levels[level][name] = value
        for level, above, name in self._inner:
            levels[above][name] = unchecked_td(levels[level], batch_size, device=device)
        return unchecked_td(levels[0], batch_size, device=device)
