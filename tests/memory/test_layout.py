"""Layouts: arrays lie apart, aligned, and tensors over them are views of the memory."""

from __future__ import annotations

import gc
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwright._memory import ALIGNMENT, Borrowed, Layout, Segment, aligned, in_numpy

DTYPES = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
DENSE = sorted((dtype for dtype in DTYPES if not re.search("bits|q|int[1-7]$|x2", str(dtype))), key=str)
PLAIN = [torch.bool, torch.uint8, torch.int16, torch.float32, torch.bfloat16, torch.complex128]

entries = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(PLAIN)), max_size=6)


@given(entries, st.integers(0, 300), st.sampled_from([8, ALIGNMENT, 4096]))
def test_arrays_lie_apart_and_aligned(entries, start, alignment):
    layout = Layout.of([(i, *entry) for i, entry in enumerate(entries)], start, alignment)
    end = start
    for field, (shape, dtype) in zip(layout.fields, entries, strict=True):
        assert (field.shape, field.dtype) == (shape, dtype)
        assert field.start >= end
        assert field.start % alignment == 0
        end = field.stop
    assert layout.end == aligned(end, alignment)


@given(entries)
def test_what_is_written_to_an_array_stays_in_it(entries):
    layout = Layout.of([(i, *entry) for i, entry in enumerate(entries)], 7)
    memory = memoryview(bytearray(layout.end))
    for tensor in layout.tensors(memory).values():
        tensor.fill_(1)
    written = layout.tensors(memory)
    assert all(bool((tensor == 1).all()) for tensor in written.values())
    assert [(tuple(t.shape), t.dtype) for t in written.values()] == entries
    assert sum(memory) == sum(sum(t.view(-1).view(torch.uint8).tolist()) for t in written.values() if t.numel())


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_a_tensor_of_any_dtype(dtype):
    layout = Layout.of([("a", (3,), torch.uint8), ("b", (2, 2), dtype)])
    tensor = layout.tensors(memoryview(bytearray(layout.end)))["b"]
    assert (tuple(tensor.shape), tensor.dtype) == ((2, 2), dtype)


def test_memory_may_begin_anywhere_in_what_is_laid_out():
    layout = Layout.of([("a", (4,), torch.int64), ("b", (2,), torch.int64)], 128)
    memory = memoryview(bytearray(layout.end))
    layout.tensors(memory)["b"][:] = torch.tensor([5, 6])
    assert layout.tensors(memory[128:], 128)["b"].tolist() == [5, 6]


def test_a_layout_is_equal_after_pickling_and_names_its_arrays():
    layout = Layout.of([(("next", "obs"), torch.Size([2]), torch.bfloat16)])
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(pickle.loads(pickle.dumps(layout))) == hash(layout)
    assert list(layout.tensors(memoryview(bytearray(64)))) == [("next", "obs")]


def test_processes_that_map_a_segment_see_the_same_tensors():
    layout, segment = Layout.of([("a", (2, 3), torch.float32)]), Segment()
    segment.grow(layout.stop)
    mine, theirs = (layout.map(segment)["a"] for _ in range(2))
    mine.fill_(3)
    assert bool((theirs == 3).all())
    segment.close()


@pytest.mark.parametrize("entries", [[], [("a", (0, 3), torch.int64)]])
def test_a_layout_without_elements_needs_no_memory(entries):
    segment = Segment()
    layout = Layout.of(entries, 128)
    assert (layout.start, layout.stop, layout.end) == (128, 128, 128)
    assert [tuple(tensor.shape) for tensor in layout.map(segment).values()] == [shape for _, shape, _ in entries]
    segment.close()


def test_memory_is_borrowed_until_the_last_tensor_of_a_layout_is_gone():
    layout = Layout.of([("a", (2,), torch.float32), ("b", (2,), torch.bfloat16)])
    loan = Borrowed(memoryview(bytearray(layout.end)))
    tensors = layout.tensors(loan.borrow())
    assert loan.borrow() is loan.borrow()
    kept = tensors["b"][1:]
    tensors.clear()
    gc.collect()
    assert loan.borrowed
    del kept
    assert not loan.borrowed


@pytest.mark.parametrize(("dtype", "there"), [(torch.float32, True), (torch.bool, True), (torch.bfloat16, False)])
def test_dtypes_that_numpy_has(dtype, there):
    assert in_numpy(dtype) is there
