"""Encoding of TensorDicts with text, objects and ragged tensors as bytes, read without executing code."""

from rollwright.data.encoding.decoding import Decoder, DecodingError, length_of, write_length
from rollwright.data.encoding.elements import Encoded, encode
from rollwright.data.encoding.objects import register_tensorclass
from rollwright.data.encoding.packed import PackedRows, pack_rows

__all__ = [
    "Decoder",
    "DecodingError",
    "Encoded",
    "PackedRows",
    "encode",
    "length_of",
    "pack_rows",
    "register_tensorclass",
    "write_length",
]
