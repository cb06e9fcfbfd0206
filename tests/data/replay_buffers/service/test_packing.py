"""Memory of what arrives: used again, and never while anything reads it."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollwright.data.replay_buffers.service.messages import ReusedMemory, pack, unpack

PAGES = 2**20 // 4096
SIZE = 2**20


def address(piece):
    """Of a piece of memory."""
    return np.frombuffer(piece, np.uint8).ctypes.data


MADE = {
    "view": lambda piece: piece[5:],
    "cast": lambda piece: piece.cast("B"),
    "array": lambda piece: np.frombuffer(piece, np.float32)[3:],
    "tensor": lambda piece: torch.frombuffer(piece, dtype=torch.float32)[3:],
    "array of a tensor": lambda piece: torch.frombuffer(piece, dtype=torch.float32).numpy()[3:],
    "tensor of an array": lambda piece: torch.from_numpy(np.frombuffer(piece, np.float32))[3:],
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_what_is_made_of_a_piece_keeps_it(made):
    memory = ReusedMemory()
    (piece,) = memory([SIZE])
    first, kept = address(piece), made(piece)
    del piece
    assert address(memory([SIZE])[0]) != first
    del kept
    assert first in [address(piece) for piece in memory([SIZE, SIZE])]


def test_what_was_unpacked_is_not_written_again():
    memory = ReusedMemory()
    value = {"batch": TensorDict({"a": torch.arange(SIZE // 8)}, []), "array": np.arange(SIZE // 8)}
    body, pieces = pack(value)
    found = []
    for _ in range(3):
        into = memory([piece.nbytes for piece in pieces])
        for mine, theirs in zip(into, pieces, strict=True):
            mine[:] = theirs.cast("B")
        found.append(unpack(body, into))
        del into, mine
    for mine in memory([SIZE, SIZE]):
        mine[:] = bytes(SIZE)
    for each in found:
        assert torch.equal(each["batch"]["a"], value["batch"]["a"])
        assert np.array_equal(each["array"], value["array"])


def test_memory_that_is_kept_has_a_limit():
    memory = ReusedMemory()
    held = [memory([SIZE + i])[0] for i in range(100)]
    assert memory.num_bytes <= 65 * (SIZE + 100)
    memory([2**28 + 1])
    assert memory.num_bytes == 0
    assert all(piece.nbytes == SIZE + i for i, piece in enumerate(held))


def faults_of(pid):
    """Pages that were new to a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_large_batches_take_no_fresh_memory_on_either_side(serve):
    buffer = serve(batch_size=32)
    data = TensorDict({"pixels": torch.zeros(32, 2**15), "other": torch.zeros(32, 2**13)}, [32])
    for _ in range(40):
        buffer.extend(data)
        buffer.sample()
    there, here = faults_of(buffer.host.pid), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        buffer.extend(data)
        buffer.sample()
    there, here = faults_of(buffer.host.pid) - there, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - here
    assert there < 10 * PAGES  # of 10 * 10 * PAGES that are written
    assert here < 5 * PAGES
