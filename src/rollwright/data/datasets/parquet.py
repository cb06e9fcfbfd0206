"""Frames in Parquet files, which pandas and Hugging Face datasets read. The only module that imports pyarrow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaf_keys, unravel
from rollwright.errors import require

SUFFIX = ".parquet"
_METADATA = b"rollwright"


def save_parquet(frames: TensorDictBase, path: str | os.PathLike[str]) -> None:
    """Write frames into a Parquet file, a row for each frame and a column for each entry.

    Columns have the names of entries with dots (``next.reward``); what has several elements is a list. Environments
    follow one another. ``datasets.load_dataset("parquet", data_files=path)`` reads the file, and :func:`load_dataset`
    gives back the frames as they were.

    Args:
        frames: ``[*env, T]``, of tensors.
        path: of the file, which must end in ``.parquet``; an older one is replaced.

    Raises:
        MissingExtraError: pyarrow is not installed.
        ValueError: the path has another end, or an entry is no tensor that Parquet has.
        OSError: the disk is full or failing.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise ValueError(f"path: expected a path that ends in {SUFFIX}, got {str(path)!r}.")
    arrow, files = _arrow()
    flat = frames.reshape(-1)
    columns, entries = {}, []
    for key in sorted(leaf_keys(flat), key=as_tuple):
        value: Any = flat.get(key)
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bfloat16 or value.dtype.is_complex:
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{key!r}: expected a tensor of numbers that Parquet has, got {kind}. Drop or cast it.")
        columns[".".join(as_tuple(key))] = _column(arrow, value.detach().cpu())
        dtype = str(value.dtype).removeprefix("torch.")
        entries.append({"key": list(as_tuple(key)), "shape": list(value.shape[1:]), "dtype": dtype})
    about = json.dumps({"batch_size": list(frames.batch_size), "entries": entries})
    table = arrow.table(columns).replace_schema_metadata({_METADATA: about.encode()})
    partial = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        files.write_table(table, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load_parquet(path: Path) -> TensorDictBase:
    """Frames of a Parquet file, in memory: those of :func:`save_parquet` as they were, of other files ``[N]``.

    Raises:
        MissingExtraError: pyarrow is not installed.
        FileNotFoundError: there is no such file.
        ValueError: a column holds neither numbers nor lists of one length.
    """
    _, files = _arrow()
    table = files.read_table(path)
    about = json.loads((table.schema.metadata or {}).get(_METADATA, b"null"))
    found: dict[NestedKey, torch.Tensor] = {}
    for name in table.column_names:
        found[unravel(tuple(name.split(".")))] = torch.from_numpy(_values(name, table.column(name)))
    frames = TensorDict(batch_size=[table.num_rows])
    if about is None:
        for key, value in found.items():
            frames[key] = value
        return frames
    for entry in about["entries"]:
        key = unravel(tuple(entry["key"]))
        frames[key] = found[key].reshape(table.num_rows, *entry["shape"]).to(getattr(torch, entry["dtype"]))
    shaped: TensorDictBase = frames.reshape(about["batch_size"])
    shaped.names = [*[None] * (shaped.ndim - 1), "time"]
    return shaped


def _column(arrow: Any, value: torch.Tensor) -> Any:
    flat = arrow.array(np.ascontiguousarray(value.reshape(-1).numpy()))
    size = value[0].numel() if len(value) else 1
    return flat if size == 1 else arrow.FixedSizeListArray.from_arrays(flat, size)


def _values(name: str, column: Any) -> Any:
    """The numbers of a column, ``[N]`` or ``[N, size]``."""
    if str(column.type).startswith(("fixed_size_list", "list", "large_list")):
        rows = [np.asarray(row) for row in column.to_numpy()] if len(column) else []
        if len({row.shape for row in rows}) <= 1 and all(row.dtype.kind in "biuf" for row in rows):
            return np.stack(rows)
    else:
        values = np.array(column.to_numpy())
        if values.dtype.kind in "biuf":
            return values
    raise ValueError(f"{name!r}: expected a column of numbers, or of lists of one length, got {column.type}.")


def _arrow() -> tuple[Any, Any]:
    purpose = "a Parquet file"
    return (
        require("pyarrow", extra="parquet", purpose=purpose),
        require("pyarrow.parquet", extra="parquet", purpose=purpose),
    )
