"""Decodes elements, one by one and many one behind the other; nothing in their bytes is executed."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.encoding.elements import (
    ALIGNMENT,
    CLASS,
    DTYPES,
    ENTRIES,
    HEAD,
    MARK,
    OBJECT,
    OBJECTS,
    STACK,
    TENSOR,
    TEXT,
    class_at,
    load_object,
)
from rollwright.data.entries import unchecked_td
from rollwright.errors import DamagedFileError

_MOST_PLANS = 4096
_LENGTH = struct.Struct("<2q")
_DEEPEST = 100
_ROOT = torch.Size(())
_BLANK = dict(NonTensorData("").__dict__)

Numbers = tuple[int, ...]
Build = Callable[[Any, int, Numbers], Any]  # of an element's bytes, the start of its payload, its numbers


class DecodingError(ValueError):
    """Bytes that are no encoded element."""


def length_of(memory: Any) -> int:
    """The length in bytes of the element that begins here.

    Raises:
        DecodingError: none does.
    """
    length, check = _LENGTH.unpack_from(memory, 0)
    if length ^ MARK != check or length < HEAD.size:
        raise DecodingError("no element begins here")
    return int(length)


def write_length(memory: Any, length: int) -> None:
    """Write the length of an element, before the rest of it is written."""
    _LENGTH.pack_into(memory, 0, length, length ^ MARK)


class Decoder:
    """Decodes elements; it remembers the schemas that it has seen.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data.encoding import encode
        >>> found = encode(TensorDict({"text": "hi", "next": {"done": torch.tensor([True])}}))
        >>> memory = bytearray(found.num_bytes)
        >>> found.write(memory)
        >>> decoder = Decoder()
        >>> decoder.decode(memory)["text"], decoder.keys(memory), decoder.entry(memory, ("next", "done"))
        ('hi', ['text', ('next', 'done')], array([ True]))
    """

    def __init__(self) -> None:
        self._plans: dict[bytes, _Plan] = {}

    def __reduce__(self) -> Any:
        return (Decoder, ())

    def decode(self, memory: bytearray) -> Any:
        """The element; its tensors share ``memory``.

        Raises:
            DecodingError: the bytes are no element.
        """
        plan, numbers, first = self._read(memory)
        try:
            return plan.build(memory, first, numbers)
        except DecodingError:
            raise
        except Exception as error:
            raise DecodingError(f"{type(error).__name__}: {error}") from error

    def check(self, memory: Any) -> None:
        """Test that bytes are an element, all of whose parts lie inside.

        Raises:
            DecodingError: they are not.
        """
        self.decode(memory if isinstance(memory, bytearray) else bytearray(memory))

    def part(self, memory: Any, name: str) -> Any:
        """An entry of a TensorDict alone, whose tensors share ``memory``; None: there is none of that name."""
        plan, numbers, first = self._read(memory)
        build = plan.parts.get(name)
        return None if build is None else build(memory, first, numbers)

    def keys(self, memory: Any) -> list[NestedKey]:
        """The entries of an element; none of one that is a tensor."""
        return list(self._read(memory)[0].entries)

    def entry(self, memory: Any, key: NestedKey) -> NDArray[Any]:
        """Values of a tensor, as a view of ``memory``.

        Raises:
            KeyError: the element has no such tensor.
        """
        plan, numbers, first = self._read(memory)
        found = plan.entries.get(key)
        if found is None:
            raise KeyError(key)
        dtype, ndim, at = found
        return _array(memory, first, numbers, at, ndim, dtype)

    def _read(self, memory: Any) -> tuple[_Plan, Numbers, int]:
        try:
            _, _, schema_bytes, count = HEAD.unpack_from(memory, 0)
        except struct.error as error:
            raise DecodingError(f"{len(memory)} bytes are less than the head of an element") from error
        if length_of(memory) != len(memory) or schema_bytes < 0:
            raise DecodingError(f"{len(memory)} bytes that do not begin as an element of that length does")
        schema = bytes(memory[HEAD.size : HEAD.size + schema_bytes])
        plan = self._plans.get(schema)
        if plan is None:
            plan = _plan(schema)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[schema] = plan
        if plan.numbers.size != 8 * count:
            raise DecodingError(f"{count} numbers, where its schema has {plan.numbers.size // 8}")
        at = HEAD.size - (-schema_bytes // ALIGNMENT) * ALIGNMENT
        try:
            return plan, plan.numbers.unpack_from(memory, at), at + 8 * count
        except struct.error as error:
            raise DecodingError("its numbers are cut off") from error


class _Plan:
    """What is known of all elements of one schema.

    Attributes:
        build: makes the element.
        numbers: of the element.
        entries: by key: dtype, dimensions, and index of the first number, of tensors; None: another kind.
        parts: makes the entries of a TensorDict, by name.
    """

    def __init__(self, schema: Any) -> None:
        self._count = 0
        self.parts: dict[str, Build] = {}
        self.entries: dict[NestedKey, Any] = {}
        self.build = self._node(schema, (), 0)
        self.numbers = struct.Struct(f"<{self._count}q")

    def _take(self, count: int) -> int:
        if not isinstance(count, int) or not 0 <= count < 64:
            raise ValueError(f"{count!r} dimensions")
        at = self._count
        self._count += count
        return at

    def _node(self, node: Any, path: tuple[str, ...], depth: int) -> Build:
        kind, *rest = node
        if depth > _DEEPEST:
            raise ValueError(f"entries in one another more than {_DEEPEST} deep")
        if kind == TENSOR:
            return self._tensor(rest, path)
        if kind in (TEXT, OBJECT, OBJECTS):
            [ndim] = rest
            if path:
                self.entries.setdefault(unravel(path), None)
            return _BYTES[kind](self._take(2), slice(self._take(ndim), self._count))
        if kind == ENTRIES:
            return self._entries(rest, path, depth)
        if kind == CLASS:
            name, inner = rest
            return _instance(name, self._take(2), self._node(inner, path, depth + 1))
        if kind == STACK:
            dim, *parts = rest
            builds = [self._node(part, path, depth + 1) for part in parts]
            for key in [key for key in self.entries if as_tuple(key)[: len(path)] == path]:
                self.entries[key] = None  # no array of its own
            return lambda memory, first, numbers: LazyStackedTensorDict(
                *[build(memory, first, numbers) for build in builds], stack_dim=dim
            )
        raise ValueError(f"a part of the kind {kind!r}")

    def _tensor(self, rest: Any, path: tuple[str, ...]) -> Build:
        name, ndim = rest
        dtype, bits = DTYPES[name]
        stored = torch.empty(0, dtype=bits, device="cpu").numpy().dtype
        at = self._take(1 + ndim) if isinstance(ndim, int) else self._take(-1)
        key = unravel(path) if path else ()
        self.entries[key] = (stored, ndim, at) if path and dtype is bits else None
        if not path:
            del self.entries[key]
        return _tensor(stored, ndim, at, None if dtype is bits else dtype)

    def _entries(self, rest: Any, path: tuple[str, ...], depth: int) -> Build:
        ndim, names, nodes = rest
        sizes = slice(self._take(ndim), self._count)
        if len(names) != len(nodes) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{len(nodes)} parts with the names {names!r}")
        parts = [(name, self._node(node, (*path, name), depth + 1)) for name, node in zip(names, nodes, strict=True)]
        if not path:
            self.parts = dict(parts)

        def build(memory: Any, first: int, numbers: Numbers) -> Any:  # of what was a TensorDict, and needs no tests
            return unchecked_td(
                {name: part(memory, first, numbers) for name, part in parts},
                torch.Size(numbers[sizes]) if ndim else _ROOT,
            )

        return build


def _plan(schema: bytes) -> _Plan:
    try:
        return _Plan(json.loads(schema))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DecodingError(f"its schema cannot be read ({type(error).__name__}: {error})") from error


# Parts -----------------------------------------------------------------------------------------------


def _array(memory: Any, first: int, numbers: Numbers, at: int, ndim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    shape = numbers[at + 1 : at + 1 + ndim]
    if numbers[at] < 0 or min(shape, default=0) < 0:
        raise DecodingError(f"a tensor of shape {list(shape)} at {numbers[at]}")
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, memory, first + numbers[at])


def _tensor(stored: np.dtype[Any], ndim: int, at: int, dtype: torch.dtype | None) -> Build:
    from_numpy = torch.from_numpy

    def build(memory: Any, first: int, numbers: Numbers) -> Any:
        return from_numpy(_array(memory, first, numbers, at, ndim, stored))

    if dtype is None:
        return build
    return lambda memory, first, numbers: build(memory, first, numbers).view(dtype)


def _slice(memory: Any, first: int, numbers: Numbers, at: int) -> Any:
    place, length = numbers[at], numbers[at + 1]
    if place < 0 or length < 0 or first + place + length > len(memory):
        raise DecodingError(f"{length} bytes at {place}, outside of the element")
    return memory[first + place : first + place + length]


def _text(at: int, sizes: slice) -> Build:
    def build(memory: Any, first: int, numbers: Numbers) -> Any:
        return _non_tensor(str(_slice(memory, first, numbers, at), "utf-8", "surrogatepass"), numbers[sizes])

    return build


def _object(at: int, sizes: slice) -> Build:
    def build(memory: Any, first: int, numbers: Numbers) -> Any:
        return _non_tensor(load_object(_slice(memory, first, numbers, at)), numbers[sizes])

    return build


def _objects(at: int, sizes: slice) -> Build:
    def build(memory: Any, first: int, numbers: Numbers) -> Any:
        return _stacked(load_object(_slice(memory, first, numbers, at)), numbers[sizes])

    return build


_BYTES: dict[str, Callable[[int, slice], Build]] = {
    TEXT: _text,
    OBJECT: _object,
    OBJECTS: _objects,
}


def _non_tensor(value: Any, batch_size: Numbers) -> Any:
    """``NonTensorData(value, batch_size=...)``, without what its constructor finds out each time."""
    if batch_size:
        return NonTensorData(value, batch_size=torch.Size(batch_size))
    made: Any = NonTensorData.__new__(NonTensorData)
    made.__dict__.update(
        _BLANK,
        _tensordict=unchecked_td({}),
        _non_tensordict={**_BLANK["_non_tensordict"], "data": value},
    )
    return made


def _stacked(values: Any, shape: Numbers) -> Any:
    if not shape:
        return _non_tensor(values, ())
    if not isinstance(values, list) or len(values) != shape[0]:
        raise DecodingError(f"expected {shape[0]} objects")
    if not values:
        return NonTensorData(None, batch_size=torch.Size(shape))
    return NonTensorStack._new_lazy_unsafe(*[_stacked(value, shape[1:]) for value in values], stack_dim=0)


def _instance(path: str, at: int, build: Build) -> Build:
    if not isinstance(path, str):
        raise ValueError(f"a class {path!r}")

    def made(memory: Any, first: int, numbers: Numbers) -> Any:
        entries, fields = build(memory, first, numbers), load_object(_slice(memory, first, numbers, at))
        cls: Any = class_at(path)
        if cls is not None:
            return cls._from_tensordict(entries, dict(fields))
        for name, value in fields.items():
            entries.set_non_tensor(name, value)
        return entries

    return made


_FORMAT = "rollwright.elements.1"


def pack_rows(rows: Sequence[Any]) -> dict[str, Any]:
    """Rows of bytes as a dictionary of tensors, with a checksum; a row of no bytes holds no element."""
    lengths = [len(row) for row in rows]
    memory = np.empty(sum(lengths), np.uint8)
    at = 0
    for row, length in zip(rows, lengths, strict=True):
        memory[at : at + length] = np.frombuffer(row, np.uint8) if length else 0
        at += length
    return {
        "format": _FORMAT,
        "rows": torch.from_numpy(memory),
        "lengths": torch.tensor(lengths, dtype=torch.int64, device="cpu"),
        "checksum": zlib.crc32(memory.data),
    }


class PackedRows(NamedTuple):
    """Rows of bytes, read from what :func:`pack_rows` made.

    Attributes:
        memory: of all rows.
        bounds: int64 ``[n + 1]``: where each begins and the last ends.
    """

    memory: memoryview
    bounds: list[int]

    @classmethod
    def of(cls, packed: Mapping[str, Any]) -> PackedRows:
        """Check and read.

        Raises:
            DamagedFileError: it is damaged.
        """
        rows, lengths, form = packed.get("rows"), packed.get("lengths"), packed.get("format")
        if form != _FORMAT or not isinstance(rows, torch.Tensor) or not isinstance(lengths, torch.Tensor):
            raise DamagedFileError(
                f"elements: expected encoded ones ({_FORMAT!r}), got {sorted(map(str, packed))} of the format "
                f"{form!r}. Load the state of a RaggedStorage."
            )
        array = rows.contiguous().numpy()
        bounds = np.append(0, lengths.numpy().cumsum())
        whole = rows.dtype == torch.uint8 and bool((lengths >= 0).all()) and int(bounds[-1]) == len(array)
        if not whole or zlib.crc32(array.data) != packed.get("checksum"):
            raise DamagedFileError(
                f"elements: {len(array)} bytes of {len(lengths)} encoded elements do not have the checksum that they "
                "were saved with. Restore the file from a copy."
            )
        read = cls(memoryview(cast(Any, array)), bounds.tolist())
        decoder = Decoder()
        for row in read:
            if len(row):
                try:
                    decoder.check(row)
                except DecodingError as error:
                    raise DamagedFileError(f"elements: one cannot be read: {error}.") from error
        return read

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[memoryview]:
        """The rows, as views."""
        for start, stop in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            yield self.memory[start:stop]
