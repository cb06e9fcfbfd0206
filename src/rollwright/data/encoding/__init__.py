"""Encoding of TensorDicts with text, objects and ragged tensors as bytes, read without executing code."""

from rollwright.data.encoding.decoding import Decoder, DecodingError, PackedRows, length_of, pack_rows, write_length
from rollwright.data.encoding.elements import Encoded, encode, register_tensorclass

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
