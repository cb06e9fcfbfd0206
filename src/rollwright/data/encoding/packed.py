"""Encoded elements one behind the other, as tensors that ``torch.save`` writes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from rollwright.data.encoding.decoding import Decoder, DecodingError
from rollwright.errors import DamagedFileError

_FORMAT = "rollwright.elements.1"


def pack_rows(rows: Sequence[Any]) -> dict[str, Any]:
    """Rows of bytes as a dictionary of tensors, with a checksum; a row of no bytes holds no element."""
    lengths = [len(row) for row in rows]
    memory = np.empty(sum(lengths), np.uint8)
    at = 0
    for row, length in zip(rows, lengths, strict=True):
        memory[at : at + length] = np.frombuffer(row, np.uint8) if length else 0
        at += length
    return {
        "format": _FORMAT,
        "rows": torch.from_numpy(memory),
        "lengths": torch.tensor(lengths, dtype=torch.int64, device="cpu"),
        "checksum": zlib.crc32(memory.data),
    }


class PackedRows(NamedTuple):
    """Rows of bytes, read from what :func:`pack_rows` made.

    Attributes:
        memory: of all rows.
        bounds: int64 ``[n + 1]``: where each begins and the last ends.
    """

    memory: memoryview
    bounds: list[int]

    @classmethod
    def of(cls, packed: Mapping[str, Any]) -> PackedRows:
        """Check and read.

        Raises:
            DamagedFileError: it is damaged.
        """
        rows, lengths, form = packed.get("rows"), packed.get("lengths"), packed.get("format")
        if form != _FORMAT or not isinstance(rows, torch.Tensor) or not isinstance(lengths, torch.Tensor):
            raise DamagedFileError(
                f"elements: expected encoded ones ({_FORMAT!r}), got {sorted(map(str, packed))} of the format "
                f"{form!r}. Load the state of a RaggedStorage."
            )
        array = rows.contiguous().numpy()
        bounds = np.append(0, lengths.numpy().cumsum())
        whole = rows.dtype == torch.uint8 and bool((lengths >= 0).all()) and int(bounds[-1]) == len(array)
        if not whole or zlib.crc32(array.data) != packed.get("checksum"):
            raise DamagedFileError(
                f"elements: {len(array)} bytes of {len(lengths)} encoded elements do not have the checksum that they "
                "were saved with. Restore the file from a copy."
            )
        read = cls(memoryview(cast(Any, array)), bounds.tolist())
        decoder = Decoder()
        for row in read:
            if len(row):
                try:
                    decoder.check(row)
                except DecodingError as error:
                    raise DamagedFileError(f"elements: one cannot be read: {error}.") from error
        return read

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[memoryview]:
        """The rows, as views."""
        for start, stop in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            yield self.memory[start:stop]
