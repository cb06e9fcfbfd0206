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

import importlib
import json
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase, is_tensorclass

from rollwright._keys import unravel

MARK = 0x5257_454C_0001_0000  # changes with the layout
HEAD = struct.Struct("<4q")
ALIGNMENT = 8
TENSOR, TEXT, OBJECT, OBJECTS = "tensor", "text", "object", "objects"
ENTRIES, CLASS, STACK = "entries", "class", "stack"

_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_IN_NUMPY = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
_AS_BITS = "bfloat16 complex32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"

#: by name: the dtype, and the dtype of the same width that NumPy has
DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    name: (dtype, dtype if name in _IN_NUMPY.split() else _WIDTHS[dtype.itemsize])
    for name in f"{_IN_NUMPY} {_AS_BITS}".split()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}


_TUPLE = "\0tuple"  # key of a dictionary that stands for a tuple, which JSON does not have
_DEEPEST = 100


class NotJSONError(TypeError):
    """An object that JSON cannot hold; the message is a phrase that names its type and place."""


def dump_object(value: Any) -> bytes:
    r"""An object as JSON.

    Numbers of NumPy become numbers of Python, and strings of a subclass (an enum) plain strings.

    Raises:
        NotJSONError: it holds something else.

    >>> dump_object({"role": "user", "ids": [1, 2.5, None], "pair": (True, "é")})
    b'{"role":"user","ids":[1,2.5,null],"pair":{"\\u0000tuple":[true,"\\u00e9"]}}'
    """
    return _encode(_plain(value, 0)).encode()


def load_object(text: bytes) -> Any:
    """The object of :func:`dump_object`.

    Raises:
        ValueError: it is no JSON.

    >>> load_object(dump_object({"pair": (1, ["a"])}))
    {'pair': (1, ['a'])}
    """
    try:
        return _decode(str(text, "utf-8"))
    except RecursionError as error:
        raise ValueError("objects in one another without end") from error


_encode = json.JSONEncoder(separators=(",", ":")).encode


def _tuple_of(found: dict[str, Any]) -> Any:
    return tuple(found[_TUPLE]) if len(found) == 1 and isinstance(found.get(_TUPLE), list) else found


_decode = json.JSONDecoder(object_hook=_tuple_of).decode


def _plain(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return value
    if depth > _DEEPEST:
        raise NotJSONError(f"objects in one another more than {_DEEPEST} deep")
    if isinstance(value, dict):
        plain = {}
        for key, part in value.items():
            if not isinstance(key, str):
                raise NotJSONError(f"a dictionary with the key {key!r} of type {type(key).__name__}, no string")
            if key == _TUPLE:
                raise NotJSONError(f"a dictionary with the key {key!r}, which stands for a tuple")
            plain[str(key)] = _plain(part, depth + 1)
        return plain
    if kind is tuple:
        return {_TUPLE: [_plain(part, depth + 1) for part in value]}
    if isinstance(value, list):
        return [_plain(part, depth + 1) for part in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.generic) and not isinstance(value, np.complexfloating):
        return _plain(value.item(), depth + 1)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise NotJSONError(f"an object of type {kind.__module__}.{kind.__qualname__}")


C = TypeVar("C", bound=type)

# Classes of this library, imported when one is read for the first time. No other module is imported for a name.
_OWN = {
    "rollwright.data.llm.history.ChatHistory",
    "rollwright.data.llm.history.History",
}
_known: dict[str, type] = {}
_paths: dict[type, str] = {}  # of classes that were written


def register_tensorclass(cls: C) -> C:
    """Let storages and datasets restore entries of a tensorclass as instances of it; returns the class.

    Bytes in a file or in shared memory name a class by its import path, and reading them imports nothing. So a class is
    restored where this process knows it: it is registered (decorate it), it was written in this process before, or it
    is one of rollwright's. Elsewhere its entries are read as a TensorDict.

    Raises:
        TypeError: it is no tensorclass.

    Example:
        >>> import torch
        >>> from tensordict import TensorClass
        >>> @register_tensorclass
        ... class Image(TensorClass):
        ...     pixels: torch.Tensor
        ...     caption: str
    """
    if not isinstance(cls, type) or not is_tensorclass(cls):
        raise TypeError(f"cls: expected a tensorclass, got {cls!r}. Decorate the class with tensordict's first.")
    _known[path_of(cls)] = cls
    return cls


def path_of(cls: type) -> str:
    """The import path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def remember(cls: type) -> str:
    """Register a class of an object that is written here; returns its path."""
    path = _paths.get(cls)
    if path is None:
        path = _paths[cls] = path_of(cls)
    _known.setdefault(path, cls)
    return path


def class_at(path: str) -> type | None:
    """The tensorclass of a path; None where this process does not know it."""
    if path not in _known and path in _OWN:
        module, _, name = path.rpartition(".")
        found: Any = getattr(importlib.import_module(module), name, None)
        if isinstance(found, type) and is_tensorclass(found):
            _known[path] = found
    return _known.get(path)


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
        return self._bytes(OBJECTS, _dumped(value.tolist()), value.batch_size)

    def stack(self, value: Any) -> tuple[Any, ...]:
        return (STACK, value.stack_dim, *(self.node(part) for part in value.tensordicts))

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
        return (ENTRIES, len(batch_size), tuple(names), tuple(nodes))

    def object(self, value: Any) -> tuple[Any, ...]:
        data = value.data
        if type(data) is str:
            return self._bytes(TEXT, data.encode("utf-8", "surrogatepass"), value.batch_size)
        return self._bytes(OBJECT, _dumped(data), value.batch_size)

    def instance(self, value: Any) -> tuple[Any, ...]:
        fields = {name: part for name, part in value._non_tensordict.items() if not name.startswith("_")}
        self._bytes(OBJECT, _dumped(fields) if fields else b"{}", ())
        return (CLASS, remember(type(value)), self.node(value._tensordict))

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
        return (TENSOR, known[0], len(shape))

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
