"""Chunks that calls bring land at their places, whichever comes first."""

from __future__ import annotations

import pytest
import torch

from rollwright._processes.network.carriers import RpcCarrier
from rollwright._processes.network.line import CarrierFailed


@pytest.fixture
def carrier():
    made = RpcCarrier("key", "nobody", limit_s=1.0, min_bytes=0)
    yield made
    made.close()


def chunk(value, size=4):
    return torch.full((size,), value, dtype=torch.uint8)


def test_chunks_that_overtake_one_another_land_where_they_belong(carrier):
    first, second, third = (memoryview(bytearray(4)) for _ in range(3))
    carrier.deliver(1, chunk(2))  # before its place is known
    carrier.receive([first, second])
    assert carrier.is_receiving
    carrier.deliver(0, chunk(1))
    assert not carrier.is_receiving
    carrier.receive([third])
    carrier.deliver(2, chunk(3))
    assert [bytes(each) for each in (first, second, third)] == [bytes([n]) * 4 for n in (1, 2, 3)]
    assert carrier.num_bytes_done == 12


def test_memory_that_is_taken_away_is_not_written(carrier):
    kept, taken = (memoryview(bytearray(4)) for _ in range(2))
    carrier.receive([kept, taken])
    carrier.divert(lambda piece: piece == 1)
    carrier.deliver(1, chunk(9))
    carrier.deliver(0, chunk(1))
    assert not carrier.is_receiving
    assert (bytes(kept), bytes(taken)) == (b"\x01" * 4, b"\x00" * 4)


def test_nothing_is_written_after_the_end(carrier):
    memory = memoryview(bytearray(4))
    carrier.receive([memory])
    carrier.close()
    carrier.deliver(0, chunk(1))
    assert bytes(memory) == b"\x00" * 4
    with pytest.raises(CarrierFailed, match="rpc: this end was closed"):
        carrier.read()
