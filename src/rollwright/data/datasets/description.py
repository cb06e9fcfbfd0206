"""The description of a dataset, and what is done with its help: load, remove, test a target folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

from tensordict import TensorDict, TensorDictBase

__all__ = ["check_target", "describe_dataset", "load_dataset", "remove_dataset", "write_description"]

FORMAT, VERSION, DESCRIPTION = "rollwright.dataset", 1, "dataset.json"
FRAMES, COMPACT = "frames", "frames-compact"  # the folders that a dataset's frames may lie in


def describe_dataset(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of ``dataset.json``.

    Raises:
        FileNotFoundError: there is no dataset at ``path``.
        ValueError: the description is damaged, or of a later format.
    """
    file = Path(path) / DESCRIPTION
    if not file.is_file():
        raise FileNotFoundError(
            f"path: expected the folder of a dataset, with a {DESCRIPTION}, and {str(path)!r} has none."
        )
    try:
        description = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no readable JSON: {error}. Restore it from a copy.") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{file} describes no rollwright dataset: its 'format' is not {FORMAT!r}.")
    if description.get("version") != VERSION:
        raise ValueError(
            f"{file} has format version {description.get('version')}; this rollwright reads {VERSION}. Use the "
            "rollwright that wrote it, or a later one."
        )
    return description


def write_description(path: Path, description: dict[str, Any]) -> None:
    """Replace ``dataset.json`` at once: a reader finds the old one or the new one, never a half."""
    draft = path / f".{DESCRIPTION}"
    draft.write_text(json.dumps({"format": FORMAT, "version": VERSION, **description}, indent=2) + "\n")
    os.replace(draft, path / DESCRIPTION)


def load_dataset(path: str | os.PathLike[str]) -> TensorDictBase:
    """The complete frames of a dataset, memory-mapped: nothing is read until it is used.

    Args:
        path: folder written by :class:`DatasetWriter` or ``rollwright collect``.

    Returns:
        ``[*env, T]``, the last dimension named ``"time"``. Changes in place reach the disk; ``clone()``
        first where that is not meant.

    Raises:
        FileNotFoundError: there is no dataset at ``path``.
        ValueError: it holds no complete batch, or is damaged.
    """
    description = describe_dataset(path)
    steps = description["steps"]
    if not steps:
        raise ValueError(f"{path}: the collection ended before its first batch was complete. There are no frames.")
    folder = Path(path) / description["data"]
    for entry in description["entries"]:  # tensordict would fill in zeros for a file that is missing
        if entry["file"] is None:  # an entry of no bytes
            continue
        file = folder / entry["file"]
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < entry["bytes"]:
            state = "is missing" if size is None else f"has {size} bytes, expected {entry['bytes']}"
            raise ValueError(f"The dataset is damaged: {file} {state}. Restore it from a copy.")
    try:
        frames = cast(TensorDictBase, TensorDict.load_memmap(folder))
    except Exception as error:
        raise ValueError(f"The dataset is damaged: {folder}: {error}. Restore it from a copy.") from error
    return frames if frames.batch_size[-1] == steps else frames[..., :steps]


def remove_dataset(path: str | os.PathLike[str]) -> None:
    """Delete a dataset, and nothing else that its folder may hold.

    Raises:
        FileNotFoundError, ValueError: ``path`` holds no dataset.
    """
    describe_dataset(path)
    for name in (FRAMES, COMPACT):
        if (Path(path) / name).exists():
            shutil.rmtree(Path(path) / name)
    (Path(path) / DESCRIPTION).unlink()


def check_target(path: Path, *, overwrite: bool) -> None:
    """Test that a dataset may be written to ``path``.

    Raises:
        FileExistsError: it may not; the message says why.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"path: expected a folder, and {str(path)!r} is a file. Choose another name.")
    if not path.is_dir() or all(found.name == f".{DESCRIPTION}" for found in path.iterdir()):
        return
    if not (path / DESCRIPTION).is_file():
        raise FileExistsError(
            f"path: {str(path)!r} holds files that are no rollwright dataset. Choose a folder that is new or empty."
        )
    if not overwrite:
        raise FileExistsError(
            f"path: {str(path)!r} holds a dataset already. Choose another folder, or pass overwrite=True to replace it."
        )
