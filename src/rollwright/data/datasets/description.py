"""The JSON description of a dataset: load, remove, and check a target folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeGuard

import torch
from tensordict import TensorDictBase

from rollwright._keys import key_str, leaves, unravel
from rollwright.data.datasets.files import read_frames, remove_frames
from rollwright.data.datasets.minari import PREFIX, load_minari, minari_folder
from rollwright.data.datasets.parquet import SUFFIX, load_parquet
from rollwright.data.loading import load_mapped, named, pickles_in
from rollwright.errors import DamagedFileError

FORMAT, VERSION, DESCRIPTION = "rollwright.dataset", 1, "dataset.json"
RAGGED_VERSION = 2  # of datasets of ragged frames, which earlier versions of rollwright do not read
FRAMES, COMPACT, ROWS = "frames", "frames-compact", "rows"  # the folders that a dataset's frames may lie in


def describe_dataset(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of ``dataset.json``.

    Raises:
        FileNotFoundError: there is no dataset at ``path``.
        DamagedFileError: the description is damaged.
        ValueError: it is of a later format, or of something else.
    """
    file = Path(path) / DESCRIPTION
    if not file.is_file():
        raise FileNotFoundError(
            f"path: expected the folder of a dataset, with a {DESCRIPTION}, and {str(path)!r} has none."
        )
    try:
        description = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{file} is no readable JSON: {error}. Restore it from a copy.") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{file} describes no rollwright dataset: its 'format' is not {FORMAT!r}.")
    if description.get("version") not in (VERSION, RAGGED_VERSION):
        raise ValueError(
            f"{file} has format version {description.get('version')}; this rollwright reads {VERSION} and "
            f"{RAGGED_VERSION}. Use the rollwright that wrote it, or a later one."
        )
    wrong = _wrong_in(description)
    if wrong:
        raise DamagedFileError(f"{file} is damaged: {wrong}. Restore it from a copy.")
    return description


def _wrong_in(description: dict[str, Any]) -> str:
    """What is wrong with a description, as a phrase; empty where nothing is."""
    sizes, entries = description.get("batch_size"), description.get("entries")
    steps, allocated = description.get("steps"), description.get("allocated_steps")
    if not (_is_size(steps) and _is_size(allocated) and steps <= allocated):
        return f"'steps' is {steps!r} of 'allocated_steps' {allocated!r}"
    if not (_are_sizes(sizes) and sizes and sizes[-1] == steps):
        return f"'batch_size' is {sizes!r}, with {steps} steps"
    if description.get("data") not in (FRAMES, COMPACT, ROWS):
        return f"'data' is {description.get('data')!r}, expected {FRAMES!r}, {COMPACT!r} or {ROWS!r}"
    if not isinstance(entries, list):
        return f"'entries' is {entries!r}"
    for entry in entries:
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("key"), list)
            and entry["key"]
            and all(isinstance(name, str) for name in entry["key"])
            and _are_sizes(entry.get("shape"))
            and isinstance(entry.get("dtype"), str)
            and _is_size(entry.get("bytes"))
            and isinstance(entry.get("file"), str if entry["bytes"] else str | None)
        ):
            return f"the entry {entry!r} lacks something"
    return ""


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value >= 0


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_size, values))


def write_description(path: Path, description: dict[str, Any]) -> None:
    """Replace ``dataset.json`` at once: a reader finds the old one or the new one, never a half.

    Raises:
        OSError: the disk is full, or fails; the old one stays.
    """
    draft = path / f".{DESCRIPTION}"
    text = json.dumps({"format": FORMAT, "version": VERSION, **description}, indent=2) + "\n"
    try:
        draft.write_text(text)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise named(error, path / DESCRIPTION, f"{len(text)} bytes") from error
    os.replace(draft, path / DESCRIPTION)


def load_dataset(path: str | os.PathLike[str], *, start: int = 0, stop: int | None = None) -> TensorDictBase:
    """The complete frames of a dataset.

    Of frames of one layout they are memory-mapped: nothing is read until it is used, and changes in place reach the
    disk; ``clone()`` first where that is not meant. Frames with text, objects or ragged entries are read and copied;
    pass ``start`` and ``stop`` where they are more than memory holds.

    Nothing in the folder is run, whoever put it there.

    Datasets of Minari are read into memory, ``[N]``, one episode after another; see
    :func:`~rollwright.data.datasets.minari.load_minari`.

    Args:
        path: folder written by :class:`DatasetWriter` or ``rollwright collect``; a dataset of Minari: its folder, or
            ``"minari:NAME"``; or a file of :func:`~rollwright.data.datasets.save_parquet`, read into memory too.
        start: the first step to read, of each environment.
        stop: the step behind the last; None: all.

    Returns:
        ``[*env, T]``, the last dimension named ``"time"``; a ``LazyStackedTensorDict`` of ragged frames.

    Raises:
        FileNotFoundError: there is no dataset at ``path``.
        DamagedFileError: a file is missing, cut short, or holds something else than described.
        ValueError: the dataset holds no complete batch, or no such steps.

    Example:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> from rollwright.data.datasets import DatasetWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> with DatasetWriter(folder.name, steps=3) as writer:
        ...     turns = [TensorDict({"text": "a" * n, "tokens": torch.arange(n)}) for n in range(3)]
        ...     writer.write(lazy_stack(turns))
        >>> list(load_dataset(folder.name, start=1)["text"])
        ['a', 'aa']
        >>> folder.cleanup()
    """
    if str(path).startswith(PREFIX) or minari_folder(Path(path)) is not None:
        return _steps_of(load_minari(str(path) if str(path).startswith(PREFIX) else Path(path)), path, start, stop)
    if Path(path).suffix == SUFFIX and not Path(path).is_dir():
        return _steps_of(load_parquet(Path(path)), path, start, stop)
    description = describe_dataset(path)
    steps = description["steps"]
    if not steps:
        raise ValueError(f"{path}: the collection ended before its first batch was complete. There are no frames.")
    stop = _checked_stop(path, steps, start, stop)
    folder = Path(path) / description["data"]
    if description["data"] == ROWS:
        return read_frames(folder, description["batch_size"][:-1], start, stop)
    frames = _load_frames(folder, description)
    return frames if start == 0 and stop == frames.batch_size[-1] else frames[..., start:stop]


def _checked_stop(path: str | os.PathLike[str], steps: int, start: int, stop: int | None) -> int:
    stop = steps if stop is None else stop
    if not 0 <= start < stop <= steps:
        raise ValueError(f"start, stop: expected some of the {steps} steps of {path}, got {start} to {stop}.")
    return stop


def _steps_of(frames: TensorDictBase, path: str | os.PathLike[str], start: int, stop: int | None) -> TensorDictBase:
    stop = _checked_stop(path, frames.batch_size[-1], start, stop)
    return frames if start == 0 and stop == frames.batch_size[-1] else frames[..., start:stop]


def _load_frames(folder: Path, description: dict[str, Any]) -> TensorDictBase:
    for entry in description["entries"]:  # tensordict would fill in zeros for a file that is missing
        if entry["file"] is not None:  # else an entry of no bytes
            _check_file(folder / entry["file"], entry["bytes"], folder)
    foreign = pickles_in(folder)
    if foreign:
        raise DamagedFileError(
            f"The dataset is damaged: {', '.join(map(str, foreign.values()))} is a pickle, which no dataset has, and "
            "which is not loaded since that can run any code. Delete it, or restore the dataset from a copy."
        )
    try:
        frames = load_mapped(folder)
    except Exception as error:
        raise DamagedFileError(f"The dataset is damaged: {folder}: {error}. Restore it from a copy.") from error
    _check_entries(frames, description, folder)
    return frames


def _check_file(file: Path, num_bytes: int, folder: Path) -> None:
    size = file.stat().st_size if file.is_file() else None
    if size is None or size < num_bytes or folder.resolve() not in file.resolve().parents:
        inside = "is missing" if size is None else f"has {size} bytes, expected {num_bytes}"
        state = inside if size is None or size < num_bytes else f"lies outside of {folder}"
        raise DamagedFileError(f"The dataset is damaged: {file} {state}. Restore it from a copy.")


def _check_entries(frames: TensorDictBase, description: dict[str, Any], folder: Path) -> None:
    """Test that the frames are those that the description names: tensordict reads a list of its own."""
    *env, _ = description["batch_size"]
    shape = torch.Size([*env, description["allocated_steps"]])
    expected = {
        unravel(tuple(entry["key"])): (torch.Size([*shape, *entry["shape"]]), entry["dtype"])
        for entry in description["entries"]
    }
    found = {
        key: (value.shape, str(value.dtype).removeprefix("torch.")) if isinstance(value, torch.Tensor) else None
        for key, value in leaves(frames).items()
    }
    if frames.batch_size != shape or found != expected:
        differing = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
        raise DamagedFileError(
            f"The dataset is damaged: {folder} holds {list(frames.batch_size)} frames and {key_str(found)}, and "
            f"{DESCRIPTION} says {list(shape)} and {key_str(expected)}; different: {key_str(differing) or 'number'}. "
            "Restore it from a copy."
        )


def remove_dataset(path: str | os.PathLike[str]) -> None:
    """Delete a dataset, and nothing else that its folder may hold.

    Raises:
        FileNotFoundError, ValueError: ``path`` holds no dataset.
    """
    describe_dataset(path)
    for name in (FRAMES, COMPACT, ROWS):
        remove_frames(Path(path) / name)
    (Path(path) / DESCRIPTION).unlink()


def check_target(path: Path, *, overwrite: bool) -> None:
    """Test that a dataset may be written to ``path``.

    Raises:
        FileExistsError: it may not; the message gives the reason.
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
