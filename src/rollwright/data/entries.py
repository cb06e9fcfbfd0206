"""Entries of a TensorDict: without the tests of its constructor, made when they are read, in tables for people."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaf_keys

_ROOT = torch.Size([])


def unchecked_td(
    entries: dict[str, Any],
    batch_size: torch.Size = _ROOT,
    *,
    device: torch.device | None = None,
    nested: bool = True,
) -> TensorDict:
    """A TensorDict that holds ``entries`` itself, and tests nothing.

    Args:
        entries: tensors, TensorDicts and non-tensor data, whose batch sizes begin with ``batch_size``.
        batch_size: of the result.
        device: of all entries.
        nested: whether dictionaries may be among the entries, which become TensorDicts.

    Example:
        >>> unchecked_td({"a": torch.zeros(2, 3)}, torch.Size([2])).batch_size
        torch.Size([2])
    """
    make: Any = TensorDict._new_unsafe  # its type of the entries is narrower than what it takes
    made: TensorDict = make(entries, batch_size=batch_size, device=device, nested=nested)
    return made


Maker = Callable[[Any], Any]


class MadeEntries(dict[str, Any]):
    """What a TensorDict keeps its entries in, where each is made when it is read, and kept from then on.

    A TensorDict of them is one as any other: reading all of it makes all entries. It is pickled as what they are made
    of, beside entries that were set, or changed since they were made.

    Args:
        source: what the makers are called with; it has ``makers(kind)``, and can be pickled.
        kind: which of its makers: a function for each entry, by key.

    Example:
        >>> class Source:
        ...     def zeros(self):
        ...         return torch.zeros(2)
        ...     def makers(self, kind):
        ...         return {"zeros": Source.zeros}
        >>> td = MadeEntries.td(Source(), "all")
        >>> MadeEntries.of(td).is_made("zeros"), td["zeros"], MadeEntries.of(td).is_made("zeros")
        (False, tensor([0., 0.]), True)
    """

    __slots__ = ("kind", "source")

    def __init__(self, source: Any, kind: str) -> None:
        super().__init__(source.makers(kind))
        self.source, self.kind = source, kind

    @classmethod
    def td(cls, source: Any, kind: str) -> TensorDict:
        """A TensorDict of batch size ``[]`` with these entries."""
        made = unchecked_td({})
        made._set_dict(cls(source, kind), validated=True)
        return made

    @classmethod
    def of(cls, td: Any) -> MadeEntries | None:
        """The entries of a TensorDict, if they are such."""
        entries = td._tensordict if type(td) is TensorDict else None
        return entries if type(entries) is cls else None

    def is_made(self, key: str) -> bool:
        """Whether an entry was read, or set."""
        return type(dict.__getitem__(self, key)) is not FunctionType

    def changes(self) -> tuple[dict[str, Any], list[str]]:
        """Entries that are not those which the source makes, and the names of entries that were taken out."""
        makers: Mapping[str, Maker] = self.source.makers(self.kind)
        own = {key: value for key, value in dict.items(self) if type(value) is not FunctionType}
        changed = {
            key: value for key, value in own.items() if key not in makers or not _same(value, makers[key], self.source)
        }
        return changed, [key for key in makers if key not in self]

    def __getitem__(self, key: str) -> Any:
        value = dict.__getitem__(self, key)
        if type(value) is FunctionType:
            value = value(self.source)
            dict.__setitem__(self, key, value)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The entry of a name, which is made now if it was not read before; else the default."""
        try:
            return self[key]
        except KeyError:
            return default

    def pop(self, key: str, *default: Any) -> Any:
        """Take an entry out, and return it; else the default."""
        if key not in self:
            return dict.pop(self, key, *default)
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        """Take the last entry out, and return its name and value."""
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The entry of a name, which is set to the default if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def values(self) -> Any:
        """All entries, which are made."""
        return self._whole().values()

    def items(self) -> Any:
        """All names and entries, which are made."""
        return self._whole().items()

    def copy(self) -> dict[str, Any]:
        """A plain dictionary of all entries, which are made."""
        return dict(self.items())

    def __iter__(self) -> Iterator[str]:  # defined, so that dict(...) asks for each value
        return dict.__iter__(self)

    def _whole(self) -> Any:
        for key in dict.__iter__(self):
            self[key]
        return super()

    def __reduce__(self) -> Any:
        changed, gone = self.changes()
        return _restored, (self.source, self.kind, *((changed, gone) if changed or gone else ()))

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {key: copy.deepcopy(value, memo) for key, value in self.items()}


def _restored(source: Any, kind: str, changed: Mapping[str, Any] | None = None, gone: Any = ()) -> MadeEntries:
    made = MadeEntries(source, kind)
    for key in gone:
        del made[key]
    made.update(changed or {})
    return made


def _same(value: Any, maker: Maker, source: Any) -> bool:
    """Whether a value is what a maker gives."""
    entries = MadeEntries.of(value)
    if entries is not None:
        plain = not value.batch_size and value.device is None and not value.is_locked
        return plain and entries.source is source and entries.changes() == ({}, [])
    if isinstance(value, torch.Tensor):
        made = maker(source)
        alike = isinstance(made, torch.Tensor) and (made.dtype, made.shape) == (value.dtype, value.shape)
        return alike and value.device == made.device and not value.requires_grad and torch.equal(value, made)
    if type(value) is NonTensorData:
        made = maker(source)
        return type(made) is NonTensorData and bool(made.data == value.data) and not value.batch_size
    return False


def entries_of(frames: TensorDictBase) -> list[dict[str, Any]]:
    """Key, shape, dtype and bytes of each entry, as JSON knows them."""
    return [_entry(frames, key) for key in sorted(leaf_keys(frames), key=as_tuple)]


def _entry(frames: TensorDictBase, key: NestedKey) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": list(as_tuple(key)), "shape": None, "dtype": "object", "bytes": 0}
    try:
        value: Any = frames.get(key)
    except RuntimeError:  # of a lazy stack of different shapes
        return {**entry, "dtype": "varies"}
    if not isinstance(value, torch.Tensor):
        return entry
    dtype = str(value.dtype).removeprefix("torch.")
    return {**entry, "shape": list(value.shape), "dtype": dtype, "bytes": value.numel() * value.element_size()}


def table_of(entries: list[dict[str, Any]]) -> list[str]:
    """Lines of a table of :func:`entries_of`, with the sum of their sizes."""
    rows = [("entry", "shape", "dtype", "size")]
    for entry in entries:
        shape = "varies" if entry["dtype"] == "varies" else str(entry["shape"] or "-")
        rows.append((".".join(entry["key"]), shape, entry["dtype"], size_of(entry["bytes"])))
    rows.append(("total", "", "", size_of(sum(entry["bytes"] for entry in entries))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{key:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
        for key, shape, dtype, size in rows
    ]


def size_of(num_bytes: int) -> str:
    """A number of bytes for people.

    >>> size_of(999), size_of(1_500), size_of(2_000_000)
    ('999 B', '1.5 kB', '2.0 MB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
