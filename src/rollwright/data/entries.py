"""Tables of entries: their shapes, dtypes and sizes, for people."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaf_keys


def entries_of(frames: TensorDictBase) -> list[dict[str, Any]]:
    """Key, shape, dtype and bytes of each entry, as JSON knows them."""
    return [_entry(frames, key) for key in sorted(leaf_keys(frames), key=as_tuple)]


def _entry(frames: TensorDictBase, key: NestedKey) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": list(as_tuple(key)), "shape": None, "dtype": "object", "bytes": 0}
    try:
        value: Any = frames.get(key)
    except RuntimeError:  # of a lazy stack of different shapes
        return {**entry, "dtype": "varies"}
    if not isinstance(value, torch.Tensor):
        return entry
    dtype = str(value.dtype).removeprefix("torch.")
    return {**entry, "shape": list(value.shape), "dtype": dtype, "bytes": value.numel() * value.element_size()}


def table_of(entries: list[dict[str, Any]]) -> list[str]:
    """Lines of a table of :func:`entries_of`, with the sum of their sizes."""
    rows = [("entry", "shape", "dtype", "size")]
    for entry in entries:
        shape = "varies" if entry["dtype"] == "varies" else str(entry["shape"] or "-")
        rows.append((".".join(entry["key"]), shape, entry["dtype"], size_of(entry["bytes"])))
    rows.append(("total", "", "", size_of(sum(entry["bytes"] for entry in entries))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{key:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
        for key, shape, dtype, size in rows
    ]


def size_of(num_bytes: int) -> str:
    """A number of bytes for people.

    >>> size_of(999), size_of(1_500), size_of(2_000_000)
    ('999 B', '1.5 kB', '2.0 MB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
