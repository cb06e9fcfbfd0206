"""Files of a dataset: their JSON description, loading and removing, a target folder, and rows of ragged frames."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import key_str, leaves, unravel
from rollwright.data.datasets.formats import PREFIX, is_parquet, load_minari, load_parquet, minari_folder
from rollwright.data.encoding import Decoder, DecodingError, encode
from rollwright.data.loading import load_mapped, named, pickles_in
from rollwright.errors import DamagedFileError

ROWS_FILE, INDEX_FILE = "frames.rows", "frames.index"
_COPY_BYTES = 1 << 23
_NUMBERS = 3  # of a frame in the index, int64: where its row begins, its length, its checksum (CRC-32)


def write_all(file: BinaryIO, offset: int, data: memoryview) -> None:
    """Write bytes to a place of an unbuffered file.

    Raises:
        OSError: the disk is full or failing; it names the file and the number of bytes.
    """
    size = len(data)
    file.seek(offset)
    try:
        while len(data):
            data = data[file.write(data) :]  # it may take less than it is given
    except OSError as error:
        raise named(error, Path(file.name), f"{size} bytes") from error


def copy_bytes(source: BinaryIO, target: BinaryIO, num_bytes: int, interrupted: Callable[[], bool]) -> None:
    """Copy from where the files are at.

    Raises:
        OSError: it was interrupted, the disk is full, or the source is too short.
    """
    while num_bytes:
        if interrupted():
            raise InterruptedError("the copy was interrupted")
        data = source.read(min(num_bytes, _COPY_BYTES))
        if not data:
            raise OSError("a file ended before its complete frames did")
        target.write(data)
        num_bytes -= len(data)


def remove_frames(folder: Path) -> None:
    """Remove the frames of a dataset, and the folders that hold nothing else; other files stay."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            if name in (ROWS_FILE, INDEX_FILE, "meta.json") or name.endswith(".memmap"):
                (Path(place) / name).unlink()
        with contextlib.suppress(OSError):  # it holds other files
            Path(place).rmdir()


# Ragged frames ------------------------------------------------------------------------------------


class FrameFiles:
    """Appends frames to two files: rows of any length, and an index of them, step by step.

    Args:
        folder: made where needed.

    Attributes:
        num_bytes: of all rows.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.num_bytes = self._num_frames = 0
        self._rows: BinaryIO = open(folder / ROWS_FILE, "w+b", buffering=0)  # noqa: SIM115 - kept open
        self._index: BinaryIO = open(folder / INDEX_FILE, "w+b", buffering=0)  # noqa: SIM115

    def write(self, batch: TensorDictBase) -> None:
        """Append a batch ``[*env, T]``.

        Raises:
            TypeError: an entry is of a kind that cannot be kept; nothing is written.
            OSError: the disk is full or failing; what was written before stays.
        """
        steps = [frame for step in batch.unbind(batch.ndim - 1) for frame in _frames(step)]
        encoded = [encode(frame, where="batch") for frame in steps]
        index = np.empty((len(encoded), _NUMBERS), "<i8")
        memory = bytearray(sum(found.num_bytes for found in encoded))
        view, at = memoryview(memory), 0
        for n, found in enumerate(encoded):
            row = view[at : at + found.num_bytes]
            found.write(row)
            index[n] = self.num_bytes + at, found.num_bytes, zlib.crc32(row)
            at += found.num_bytes
        write_all(self._rows, self.num_bytes, view)
        write_all(self._index, self._num_frames * index.itemsize * _NUMBERS, memoryview(index.tobytes()))
        self.num_bytes += at
        self._num_frames += len(encoded)

    def close(self) -> None:
        """Wait until the disk has everything."""
        for file in (self._rows, self._index):
            os.fsync(file.fileno())
            file.close()


def read_frames(folder: Path, env: Sequence[int], start: int, stop: int) -> TensorDictBase:
    """Frames of the steps ``start <= t < stop``, copied: ``[*env, stop - start]``, a ``LazyStackedTensorDict``.

    Raises:
        DamagedFileError: a file is missing, cut short, or holds something else.
    """
    num_envs = int(np.prod(env, dtype=np.int64))
    first, count = start * num_envs, (stop - start) * num_envs
    index = np.frombuffer(_read_at(folder / INDEX_FILE, 8 * _NUMBERS * first, 8 * _NUMBERS * count), "<i8")
    decoder, frames = Decoder(), []
    with open(folder / ROWS_FILE, "rb") if (folder / ROWS_FILE).is_file() else _missing(folder / ROWS_FILE) as file:
        size = os.fstat(file.fileno()).st_size
        for n, (at, length, check) in enumerate(index.reshape(-1, _NUMBERS).tolist()):
            if at < 0 or length < 0 or at + length > size:
                raise _damaged(folder, f"frame {first + n} lies at byte {at}, with {length} bytes of {size}")
            file.seek(at)
            row = bytearray(file.read(length))
            if zlib.crc32(row) != check:
                raise _damaged(folder, f"frame {first + n} does not have the checksum that it was written with")
            try:
                frames.append(decoder.decode(row))
            except DecodingError as error:
                raise _damaged(folder, f"frame {first + n} cannot be read: {error}") from error
    steps = [_stacked(frames[n : n + num_envs], list(env)) for n in range(0, count, num_envs)]
    found = LazyStackedTensorDict(*steps, stack_dim=len(env))
    found.names = [*[None] * len(env), "time"]
    return found


def _frames(step: TensorDictBase) -> list[TensorDictBase]:
    """The frames ``[]`` of a step ``[*env]``, the last dimension running fastest."""
    if not step.ndim:
        return [step]
    return [frame for part in step.unbind(0) for frame in _frames(part)]


def _stacked(frames: list[TensorDictBase], shape: list[int]) -> TensorDictBase:
    if not shape:
        return frames[0]
    size = len(frames) // shape[0]
    parts = [_stacked(frames[n : n + size], shape[1:]) for n in range(0, len(frames), size)]
    return LazyStackedTensorDict(*parts, stack_dim=0)


def _read_at(file: Path, offset: int, num_bytes: int) -> bytes:
    if not file.is_file():
        _missing(file)
    with open(file, "rb") as source:
        source.seek(offset)
        data = source.read(num_bytes)
    if len(data) != num_bytes:
        raise _damaged(file, f"it has {file.stat().st_size} bytes, expected at least {offset + num_bytes}")
    return data


def _missing(file: Path) -> Any:
    raise _damaged(file, "it is missing")


def _damaged(place: Path, what: str) -> DamagedFileError:
    return DamagedFileError(f"The dataset is damaged: {place}: {what}. Restore it from a copy.")


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
    :func:`~rollwright.data.datasets.formats.load_minari`.

    Args:
        path: folder written by :class:`DatasetWriter` or ``rollwright collect``; a dataset of Minari: its folder, or
            ``"minari:NAME"``; or a Parquet file, or a folder of ``save_to_disk()`` of Hugging
            Face's ``Dataset``, read into memory too.
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
    if is_parquet(Path(path)):
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
