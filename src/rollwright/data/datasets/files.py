"""Files of a dataset: written and copied where the disk may be full, and removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from rollwright.data.loading import named

ROWS_FILE, INDEX_FILE = "frames.rows", "frames.index"
_COPY_BYTES = 1 << 23


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
