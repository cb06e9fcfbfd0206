"""Files of a dataset: written where the disk may be full, copied and removed; encoded rows of ragged frames."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.data.encoding import Decoder, DecodingError, encode
from rollwright.data.loading import named
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


class FrameRows:
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
