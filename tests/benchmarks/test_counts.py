"""The counting: what is counted is what was done."""

from __future__ import annotations

import sys

import torch
from benchmarks.counts import CallCounter, OperationCounter, count


def test_counts_tensor_operations_and_the_bytes_that_copies_move():
    value = torch.zeros(10)
    with OperationCounter() as counter:
        value.clone()  # 40 bytes
        torch.empty(3, dtype=torch.float64).copy_(torch.empty(3))  # two allocations, 24 bytes
        value + 1  # computes, moves nothing
    assert (counter.operations, counter.bytes_moved) == (5, 64)


def test_counts_nothing_outside_of_the_block():
    with OperationCounter() as counter:
        pass
    torch.zeros(10).clone()
    assert (counter.operations, counter.bytes_moved) == (0, 0)


def test_counts_python_calls_and_c_calls_apart():
    def one():
        return len("a")

    with CallCounter() as none:
        pass
    with CallCounter() as three:
        one()
        one()
        one()
    assert three.events["call"] - none.events["call"] == 3
    assert three.events["c_call"] - none.events["c_call"] == 3
    assert sys.getprofile() is None


def test_counts_are_divided_by_steps_and_bytes_by_frames():
    value = torch.zeros(8)

    def collect():
        for _ in range(4):
            value.clone()

    counts = count(collect, steps=4, frames=16)
    assert counts.operations == 1
    assert counts.bytes_moved == 4 * 32 / 16
