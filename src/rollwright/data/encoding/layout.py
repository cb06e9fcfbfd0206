"""Where the parts of an encoded element lie.

::

    4 int64   length in bytes, the same ^ MARK, length of the schema, number of numbers
    schema    JSON: names, kinds, dtypes and numbers of dimensions; equal for elements that differ in sizes only
    numbers   int64: of each part of the schema its place and its sizes
    payload   text as UTF-8, objects as JSON, tensors as they lie in memory; each from a multiple of 8

Places are counted from the start of the payload. All numbers are little-endian.

A node of the schema is a list that begins with its kind:

=========  ==================================================  ===========================================
kind       rest of the node                                    numbers
=========  ==================================================  ===========================================
tensor     dtype, dimensions                                   place, shape
text       dimensions of the batch                             place, bytes, batch size
object     dimensions of the batch                             place, bytes, batch size
objects    dimensions of the batch; a list of values           place, bytes, batch size
entries    dimensions of the batch, names, nodes               batch size
class      import path, node of its entries, names of objects  place, bytes; those of the node
stack      dimension, nodes                                    those of the nodes
=========  ==================================================  ===========================================
"""

from __future__ import annotations

import struct

import torch

MARK = 0x5257_454C_0001_0000  # changes with the layout
HEAD = struct.Struct("<4q")
ALIGNMENT = 8
TENSOR, TEXT, OBJECT, OBJECTS, ENTRIES, CLASS, STACK = (
    "tensor",
    "text",
    "object",
    "objects",
    "entries",
    "class",
    "stack",
)

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_IN_NUMPY = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_AS_BITS = tuple(
    found
    for name in (
        "bfloat16",
        "complex32",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if isinstance(found := getattr(torch, name, None), torch.dtype)
)

#: by name: the dtype, and the dtype of the same width that NumPy has
DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    **{str(dtype).removeprefix("torch."): (dtype, dtype) for dtype in _IN_NUMPY},
    **{str(dtype).removeprefix("torch."): (dtype, _WIDTHS[dtype.itemsize]) for dtype in _AS_BITS},
}
