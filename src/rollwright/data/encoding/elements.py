"""Encodes an element: a TensorDict with text, objects and ragged tensors, or a tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase, is_tensorclass

from rollwright._keys import unravel
from rollwright.data.encoding import layout
from rollwright.data.encoding.layout import ALIGNMENT, DTYPES, HEAD, MARK
from rollwright.data.encoding.objects import NotJSONError, dump_object, remember

_MOST_SCHEMAS = 4096
_NAMES = {dtype: (name, bits) for name, (dtype, bits) in DTYPES.items()}
_schemas: dict[Any, bytes] = {}  # by nested tuples: to make the JSON is most of the cost of a small element


class Encoded:
    """An element whose length is known, and which is not copied yet.

    Args:
        schema: of its parts.
        numbers: of the schema's parts.
        parts: place in the payload, and what goes there.
        payload: length of the payload.

    Attributes:
        num_bytes: length.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data.encoding import Decoder
        >>> found = encode(TensorDict({"text": "hi", "tokens": torch.arange(3)}))
        >>> memory = bytearray(found.num_bytes)
        >>> found.write(memory)
        >>> Decoder().decode(memory)["tokens"]
        tensor([0, 1, 2])
    """

    __slots__ = ("_numbers", "_parts", "_payload_at", "_schema", "num_bytes")

    def __init__(
        self, schema: bytes, numbers: list[int], parts: list[tuple[int, bytes | NDArray[Any]]], payload: int
    ) -> None:
        self._schema, self._numbers, self._parts = schema, numbers, parts
        self._payload_at = HEAD.size + _aligned(len(schema)) + 8 * len(numbers)
        self.num_bytes = self._payload_at + payload

    def write(self, memory: Any) -> None:
        """Copy the element to memory of :attr:`num_bytes`: the only copy of its tensors."""
        schema, numbers = self._schema, self._numbers
        HEAD.pack_into(memory, 0, self.num_bytes, self.num_bytes ^ MARK, len(schema), len(numbers))
        memory[HEAD.size : HEAD.size + len(schema)] = schema
        first = self._payload_at
        struct.pack_into(f"<{len(numbers)}q", memory, first - 8 * len(numbers), *numbers)
        for place, part in self._parts:
            at = first + place
            if isinstance(part, bytes):
                memory[at : at + len(part)] = part
            else:
                np.ndarray(part.shape, part.dtype, memory, at)[...] = part


def encode(data: Any, *, where: str = "data") -> Encoded:
    """Measure an element.

    Args:
        data: a TensorDict (with text, objects, ragged tensors, nested TensorDicts and tensorclasses), or a tensor.
        where: argument to name in messages.

    Returns:
        The element; it refers to the memory of ``data`` until it is written.

    Raises:
        TypeError: an entry is of a kind that is not kept: an object that is no text, number, list or dictionary, or a
            tensor that is sparse, nested or quantised.
    """
    walk = _Walk()
    try:
        shape = walk.node(data)
    except _Refused as refused:
        raise _refusal(where, refused) from None
    schema = _schemas.get(shape)
    if schema is None:
        schema = json.dumps(shape, separators=(",", ":")).encode()
        if len(_schemas) >= _MOST_SCHEMAS:
            _schemas.clear()
        _schemas[shape] = schema
    return Encoded(schema, walk.numbers, walk.parts, walk.end)


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


class _Refused(Exception):
    """An entry is of a kind that is not kept; its names are collected on the way out."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.path = what, list[str]()


class _Walk:
    """Goes through an element: its schema as nested tuples, its numbers, its parts."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.parts: list[tuple[int, bytes | NDArray[Any]]] = []
        self.end = 0

    def node(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        node = _nodes.get(kind)
        if node is None:
            node = _nodes[kind] = self._node_of(value)
        return node(self, value)

    def _node_of(self, value: Any) -> Callable[[_Walk, Any], tuple[Any, ...]]:
        """The method for all values of a type."""
        if isinstance(value, torch.Tensor):
            return _Walk.tensor
        if isinstance(value, NonTensorStack):
            return _Walk.objects
        if isinstance(value, LazyStackedTensorDict):
            return _Walk.stack
        if isinstance(value, TensorDictBase):
            return _Walk.entries
        if isinstance(value, NonTensorData) or getattr(value, "_is_non_tensor", False):
            return _Walk.object
        if is_tensorclass(value):
            return _Walk.instance
        raise _Refused(f"an object of type {type(value).__name__}")

    def objects(self, value: Any) -> tuple[Any, ...]:
        return self._bytes(layout.OBJECTS, _dumped(value.tolist()), value.batch_size)

    def stack(self, value: Any) -> tuple[Any, ...]:
        return (layout.STACK, value.stack_dim, *(self.node(part) for part in value.tensordicts))

    def entries(self, value: Any) -> tuple[Any, ...]:
        batch_size, name = value.batch_size, ""
        self.numbers += batch_size
        names: list[str] = []
        nodes: list[tuple[Any, ...]] = []
        try:
            for name, part in value.items():
                node = _nodes.get(type(part))
                nodes.append(self.node(part) if node is None else node(self, part))
                names.append(name)
        except _Refused as refused:
            refused.path.insert(0, name)
            raise
        return (layout.ENTRIES, len(batch_size), tuple(names), tuple(nodes))

    def object(self, value: Any) -> tuple[Any, ...]:
        data = value.data
        if type(data) is str:
            return self._bytes(layout.TEXT, data.encode("utf-8", "surrogatepass"), value.batch_size)
        return self._bytes(layout.OBJECT, _dumped(data), value.batch_size)

    def instance(self, value: Any) -> tuple[Any, ...]:
        fields = {name: part for name, part in value._non_tensordict.items() if not name.startswith("_")}
        self._bytes(layout.OBJECT, _dumped(fields) if fields else b"{}", ())
        return (layout.CLASS, remember(type(value)), self.node(value._tensordict))

    def tensor(self, value: torch.Tensor) -> tuple[Any, ...]:
        known = _NAMES.get(value.dtype)
        try:
            if known is None or known[1] is not value.dtype:
                raise TypeError  # of no dtype of NumPy
            array = value.numpy()
        except (RuntimeError, TypeError):
            array = _array_of(value)
            known = _NAMES[value.dtype]
        shape = array.shape
        self.numbers.append(self.end)
        self.numbers += shape
        if array.size:
            self.parts.append((self.end, array))
            self.end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return (layout.TENSOR, known[0], len(shape))

    def _bytes(self, kind: str, text: bytes, batch_size: Any) -> tuple[Any, ...]:
        self.numbers += (self.end, len(text), *batch_size)
        if text:
            self.parts.append((self.end, text))
            self.end += -(-len(text) // ALIGNMENT) * ALIGNMENT
        return (kind, len(batch_size))


def _array_of(value: torch.Tensor) -> NDArray[Any]:
    """A tensor that NumPy does not take as it is."""
    if value.layout is not torch.strided or value.is_nested or value.dtype not in _NAMES:
        form = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise _Refused(f"a tensor that is {form}, of dtype {value.dtype}")
    value, bits = value.detach().cpu(), _NAMES[value.dtype][1]
    if bits is not value.dtype:
        value = value.view(bits)
    array: NDArray[Any] = value.resolve_conj().resolve_neg().numpy()
    return array


def _dumped(value: Any) -> bytes:
    try:
        return dump_object(value)
    except NotJSONError as error:
        raise _Refused(str(error)) from None


def _refusal(where: str, refused: _Refused) -> TypeError:
    key = unravel(tuple(refused.path)) if refused.path else ()
    return TypeError(
        f"{where}: expected tensors, text, and lists, dictionaries and numbers, got {refused.what} in {key!r}. "
        "Convert it to one of these (an array to a tensor, bytes to text, a UUID to str), leave it out with "
        f"exclude({key!r}), or use a ListStorage, which keeps objects of one process."
    )


_nodes: dict[type, Callable[[_Walk, Any], tuple[Any, ...]]] = {}  # to ask what a value is costs most
