"""Opens files of frames without running code that is in them, and writes such files."""

from __future__ import annotations

import copyreg
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright.errors import DamagedFileError

_PICKLES = (".pickle", ".pkl")  # tensordict writes objects that JSON does not know to such files


def _allow_tensordicts() -> None:
    """Let ``torch.load(weights_only=True)`` make TensorDicts, as tensordict itself does from version 0.15 on."""
    reduce: Callable[..., Any] = copyreg.dispatch_table[TensorDict]
    torch.serialization.add_safe_globals([TensorDict, LazyStackedTensorDict, reduce(TensorDict({}, []))[0]])


_allow_tensordicts()


def load_mapped(folder: Path, *, allow_pickle: bool = False, remedy: str = "Pass allow_pickle=True") -> TensorDictBase:
    """A TensorDict that ``TensorDict.memmap`` wrote.

    Args:
        folder: where it lies.
        allow_pickle: load objects that are pickled. A pickle can run any code: only for files that you trust.
        remedy: what to do where objects are pickled and ``allow_pickle`` is not set, for the message.

    Raises:
        ValueError: an entry is pickled, and ``allow_pickle`` is not set.
    """
    try:
        loaded: Any = TensorDict.load_memmap(folder, allow_pickle=allow_pickle)
    except RuntimeError as error:
        found = {} if allow_pickle else pickles_in(folder)
        if not found:
            raise
        entries = "; ".join(f"{entry!r} in {file}" for entry, file in found.items())
        raise ValueError(
            f"{folder} holds pickles, and loading a pickle can run any code: {entries}. {remedy} if you trust who "
            "wrote them."
        ) from error
    return cast(TensorDictBase, loaded)


def pickles_in(folder: Path) -> dict[str, Path]:
    """The files below a folder that hold pickles, by entry: its names with dots in between."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in _PICKLES)
    return {".".join(file.relative_to(folder).parent.parts): file for file in files}


def load_saved(file: Path, *, allow_pickle: bool = False, remedy: str = "Pass allow_pickle=True") -> Any:
    """What ``torch.save`` wrote, on the CPU.

    Args:
        file: to read.
        allow_pickle: load all objects. A pickle can run any code: only for files that you trust.
        remedy: see :func:`load_mapped`.

    Raises:
        ValueError: the file holds other objects than tensors and numbers, and ``allow_pickle`` is not set.
        DamagedFileError: it is cut short, or was not written by ``torch.save``.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # torch seeks where a damaged file says
            raise
        others = [] if allow_pickle else _objects_in(file)
        if not others:
            why = str(error).partition("\n")[0] or f"{type(error).__name__}, its size is {file.stat().st_size} bytes"
            raise DamagedFileError(f"{file} is damaged, or was not written by torch.save: {why}") from error
        raise ValueError(
            f"{file} holds objects of {', '.join(others)}, and loading what is no tensor can run any code. {remedy} "
            "if you trust who wrote it."
        ) from error


def _objects_in(file: Path) -> list[str]:
    """Classes and functions that a file of ``torch.save`` names, and that are not loaded without trust."""
    try:
        return list(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # it cannot be read at all
        return []


def save(value: Any, file: Path) -> None:
    """Write a file with ``torch.save``.

    Raises:
        OSError: the disk is full, or fails; the part that was written is removed.
    """
    sink = _Sink()
    try:
        with open(file, "wb") as sink.target:
            try:
                torch.save(value, cast(Any, sink))
            except RuntimeError as error:  # torch's own, where its writer stops early
                raise sink.failure or error from error
    except OSError as error:
        file.unlink(missing_ok=True)
        raise named(error, file, f"{sink.num_bytes} bytes or more") from error


def named(error: OSError, file: Path, size: str) -> OSError:
    """An error of the system, with the file that it is about and how much was to be written."""
    if error.errno is None:
        return error
    return OSError(error.errno, f"{os.strerror(error.errno)}: could not write {size}", str(file))


class _Sink:
    """Hands on what is written, and remembers what went wrong: torch raises an error without the cause."""

    target: BinaryIO

    def __init__(self) -> None:
        self.failure: OSError | None = None
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        try:
            written = self.target.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.num_bytes += written
        return written

    def flush(self) -> None:
        self.target.flush()
