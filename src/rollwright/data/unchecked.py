"""unchecked_td: a TensorDict of entries that are known to fit, without the tests of its constructor."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

_ROOT = torch.Size([])


def unchecked_td(
    entries: dict[str, Any],
    batch_size: torch.Size = _ROOT,
    *,
    device: torch.device | None = None,
    nested: bool = True,
) -> TensorDict:
    """A TensorDict that holds ``entries`` itself, and tests nothing.

    Args:
        entries: tensors, TensorDicts and non-tensor data, whose batch sizes begin with ``batch_size``.
        batch_size: of the result.
        device: of all entries.
        nested: whether dictionaries may be among the entries, which become TensorDicts.

    Example:
        >>> unchecked_td({"a": torch.zeros(2, 3)}, torch.Size([2])).batch_size
        torch.Size([2])
    """
    make: Any = TensorDict._new_unsafe  # its type of the entries is narrower than what it takes
    made: TensorDict = make(entries, batch_size=batch_size, device=device, nested=nested)
    return made
