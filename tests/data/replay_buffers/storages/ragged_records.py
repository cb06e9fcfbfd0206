"""Ragged records with checksums, for tests of storages."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, lazy_stack

__all__ = ["check_whole", "record", "records"]


def record(writer: int, serial: int, longest: int = 400) -> TensorDict:
    """A record of any length, with a checksum of what it holds."""
    rng = np.random.default_rng((writer, serial))
    length = int(rng.integers(0, longest))
    tokens = torch.from_numpy(rng.integers(0, 1 << 40, length))
    text = "".join(map(chr, rng.integers(32, 2000, length // 2)))
    data = {
        "writer": writer,
        "serial": serial,
        "tokens": tokens,
        "text": text,
        "meta": NonTensorData({"length": length, "turns": [text[:3], None]}),
        "collector": {"traj_ids": torch.tensor(writer * 1000 + serial // 5)},
        "next": {"done": torch.tensor([serial % 5 == 4])},
    }
    if serial % 3 == 0:
        data["log_probs"] = -tokens.float()
    return TensorDict({**data, "checksum": torch.tensor(_checksum(writer, serial, tokens, text))})


def records(writer: int, start: int, n: int, longest: int = 400) -> LazyStackedTensorDict:
    return lazy_stack([record(writer, serial, longest) for serial in range(start, start + n)])


def check_whole(batch: TensorDictBase) -> list[tuple[int, int]]:
    """Test each record; returns writers and serials."""
    found = []
    for data in batch.unbind(0):
        writer, serial, tokens, text = int(data["writer"]), int(data["serial"]), data["tokens"], data["text"]
        assert int(data["checksum"]) == _checksum(writer, serial, tokens, text)
        assert data["meta"] == {"length": len(tokens), "turns": [text[:3], None]}
        assert ("log_probs" in data) == (serial % 3 == 0)
        if serial % 3 == 0:
            assert torch.equal(data["log_probs"], -tokens.float())
        found.append((writer, serial))
    return found


def _checksum(writer: int, serial: int, tokens: torch.Tensor, text: str) -> int:
    return zlib.crc32(f"{writer}/{serial}/{text}".encode() + tokens.numpy().tobytes())
