"""Batches that a storage is given and gives: rows one by one, structures of tensors, columns at random positions."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection, is_tensorclass

from rollwright._keys import NestedKey, as_tuple, key_str, leaves, place, unravel
from rollwright._memory import in_numpy
from rollwright._options import whole
from rollwright._tensors import as_tensor
from rollwright.data.encoding.elements import class_at, remember
from rollwright.data.entries import unchecked_td

Form = Any
"""What an element is, as JSON can hold it; None: a tensor, or a TensorDict of tensors and TensorDicts.

``["dict", [[key, form], ...]]``, and so for ``"list"`` and ``"tuple"``; ``["namedtuple", class, [...]]``, and so for
``"dataclass"`` and ``"tensorclass"``; ``["tensordict", [...]]``. Those that may have batch dimensions of their own have
their number at the end.
"""

_classes: dict[str, type] = {}  # namedtuples and dataclasses that were written in this process


def is_structure(data: Any) -> bool:
    """Whether data are a dictionary, a list, a tuple or a dataclass, whose entries are looked at one by one.

    >>> is_structure({"a": 1}), is_structure((1, 2)), is_structure(torch.zeros(2)), is_structure("text")
    (True, True, False, False)
    """
    if isinstance(data, torch.Tensor) or is_tensor_collection(data):
        return False
    return isinstance(data, Mapping | list | tuple) or (dataclasses.is_dataclass(data) and not isinstance(data, type))


def is_a_class(data: Any) -> bool:
    """Whether data are an instance of a tensorclass that somebody has defined: no text or other object."""
    return is_tensorclass(data) and not isinstance(data, NonTensorData | NonTensorStack)


def _entries(data: Any) -> list[tuple[Any, Any]]:
    """The entries of a structure, by name."""
    if isinstance(data, Mapping):
        return list(data.items())
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return list(zip(data._fields, data, strict=True))
    if isinstance(data, list | tuple):
        return list(enumerate(data))
    return [(field.name, getattr(data, field.name)) for field in dataclasses.fields(data) if field.init]


def _like(data: Any, values: Sequence[Any]) -> Any:
    """A structure like another, of other values."""
    if isinstance(data, Mapping):
        return dict(zip(data, values, strict=True))
    if isinstance(data, tuple):
        make: Any = getattr(type(data), "_make", tuple)
        return make(values)
    if isinstance(data, list):
        return list(values)
    return type(data)(**{name: value for (name, _), value in zip(_entries(data), values, strict=True)})


def mapped(function: Callable[[Any], Any], data: Any) -> Any:
    """A structure of ``function(leaf)`` for each leaf; tensors, TensorDicts and tensorclasses are leaves.

    >>> mapped(lambda leaf: leaf + 1, {"a": 1, "b": (2, [3])})
    {'a': 2, 'b': (3, [4])}
    """
    if not is_structure(data):
        return function(data)
    return _like(data, [mapped(function, value) for _, value in _entries(data)])


def stacked(items: Sequence[Any]) -> Any:
    """Elements of one structure as a structure of batches.

    Raises:
        ValueError: their structures or shapes differ, or a leaf is no tensor, TensorDict or tensorclass.

    >>> stacked([(torch.tensor(1), {"a": torch.tensor(2)}), (torch.tensor(3), {"a": torch.tensor(4)})])
    (tensor([1, 3]), {'a': tensor([2, 4])})
    """
    first = items[0]
    if all(is_tensor_collection(item) for item in items):
        return TensorDict.maybe_dense_stack(list(items), 0)
    if all(isinstance(item, torch.Tensor) and item.shape == first.shape for item in items):
        return torch.stack(list(items))
    names = [name for name, _ in _entries(first)] if is_structure(first) else None
    if names is None or any(type(item) is not type(first) for item in items):
        raise ValueError(f"expected tensors of one shape, got {type(first).__name__}")
    columns = [dict(_entries(item)) for item in items]
    if any(list(column) != names for column in columns):
        raise ValueError(f"expected elements with the entries {names}")
    return _like(first, [stacked([column[name] for column in columns]) for name in names])


def unbound(data: Any, dim: int) -> list[Any] | None:
    """The rows of a structure of batches; None: its leaves are no tensors with a common number of rows.

    >>> unbound({"a": torch.arange(2)}, 0)
    [{'a': tensor(0)}, {'a': tensor(1)}]
    """
    found: list[Any] = []
    mapped(found.append, data)
    arrays = [isinstance(leaf, torch.Tensor | np.ndarray) or is_tensor_collection(leaf) for leaf in found]
    if not found or not all(arrays) or any(len(leaf.shape) <= dim for leaf in found):
        return None
    sizes = {int(leaf.shape[dim]) for leaf in found}
    if len(sizes) != 1:
        return None
    before = (slice(None),) * dim
    data = mapped(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf, data)
    return [mapped(operator.itemgetter((*before, n)), data) for n in range(sizes.pop())]


# Rows -------------------------------------------------------------------------------------------------


def form_str(form: Form) -> str:
    """What an element is, for a message.

    >>> form_str(["tuple", [[0, "tensor"]]]), form_str(None)
    ("a tuple of 'tensor'", 'a TensorDict or tensor')
    """
    if form is None:
        return "a TensorDict or tensor"
    if isinstance(form, str):
        return repr(form)
    inner = form[2] if isinstance(form[1], str) else form[1]
    names = inner if form[0] in ("dict", "tensordict") else ()
    listed = ", ".join(repr(name) for name, _ in names) or ", ".join(form_str(below) for _, below in inner)
    return f"a {form[1] if isinstance(form[1], str) else form[0]} of {listed}"


def packed(data: Any, ndim: int) -> tuple[TensorDictBase | torch.Tensor, Form]:
    """Data as one tensor or TensorDict with ``ndim`` batch dimensions, and what they were.

    Args:
        data: a tensor, a TensorDict, a tensorclass, an array, a number, or a structure of those, ``[*batch, ...]``.
        ndim: dimensions of the batch.

    Raises:
        TypeError: a leaf is something else.
        ValueError: leaves have other batch dimensions.

    >>> td, form = packed({"a": torch.zeros(3), "b": (torch.zeros(3, 2),)}, 1)
    >>> list(td.keys(True, True)), td.batch_size, form
    (['a', ('b', '0')], torch.Size([3]), ['dict', [['a', 'tensor'], ['b', ['tuple', [[0, 'tensor']]]]]])
    """
    found: dict[tuple[str, ...], torch.Tensor] = {}
    form = _form(data, (), ndim, found)
    if form == "tensor":
        return found[()], None
    if isinstance(data, TensorDictBase) and _is_plain(form):
        return data, None
    batches = {tuple(value.shape[:ndim]) for value in found.values()}
    short = [path for path, value in found.items() if value.ndim < ndim]
    if len(batches) != 1 or short:
        got = ", ".join(f"{unravel(path)!r}: {list(value.shape)}" for path, value in found.items())
        raise ValueError(
            f"data: expected leaves whose first {ndim} dimensions are the same, got {got or 'none'}. A list is a list "
            "of elements; the leaves of a dictionary or a tuple are batches. Pass one element to add()."
        )
    batch = data.batch_size if is_tensor_collection(data) else batches.pop()
    nested: dict[str, Any] = {}
    for path, value in found.items():
        place(nested, path, value)
    return TensorDict(nested, batch_size=batch), form


def joined(items: Sequence[Any], ndim: int) -> tuple[TensorDictBase | torch.Tensor, Form]:
    """Elements as one tensor or TensorDict, stacked along a new first dimension, and what each of them is.

    Args:
        items: at least one; each as :func:`packed` takes it, with ``ndim - 1`` batch dimensions.
        ndim: dimensions of the batch that results.

    Raises:
        TypeError: a leaf is no tensor, or elements differ in their structure.
        KeyError, ValueError: they differ in their entries or shapes.

    >>> joined([TensorDict({"a": torch.tensor(n)}) for n in range(3)], 1)[0]["a"]
    tensor([0, 1, 2])
    """
    parts = [packed(item, ndim - 1) for item in items]
    first, form = parts[0]
    for place_, (part, other) in enumerate(parts):
        if other != form or isinstance(part, torch.Tensor) is not isinstance(first, torch.Tensor):
            raise TypeError(
                f"data: expected elements of one structure, got {_shown(items[0])} at 0 and "
                f"{_shown(items[place_])} at {place_}. Store them in a ListStorage, or in buffers of their own."
            )
    if isinstance(first, torch.Tensor):
        return _stack("data", [part for part, _ in parts]), form
    columns = [leaves(cast(TensorDictBase, part)) for part, _ in parts]
    for place_, column in enumerate(columns):
        if column.keys() != columns[0].keys() or parts[place_][0].shape != first.shape:
            raise KeyError(
                f"data: expected elements with the entries {key_str(columns[0])} and batch size {list(first.shape)}, "
                f"got {key_str(column)} and {list(parts[place_][0].shape)} at {place_}. Use a RaggedStorage or a "
                "ListStorage for elements that differ."
            )
    nested: dict[str, Any] = {}
    for key in columns[0]:
        place(nested, key, _stack(repr(key), [column[key] for column in columns]))
    return TensorDict(nested, batch_size=[len(items), *first.shape]), form


def _stack(name: str, values: Sequence[Any]) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        if all(value.shape == values[0].shape for value in values):
            return torch.stack(list(values))
        shapes = sorted({tuple(value.shape) for value in values})
        raise ValueError(
            f"data: expected {name} of one shape in all elements, got {shapes}. Use a RaggedStorage or a ListStorage."
        )
    return NonTensorStack(*values)  # refused by whoever keeps tensors only


def _shown(item: Any) -> str:
    return f"a {type(item).__name__}"


def _is_plain(form: Form) -> bool:
    """Whether it is the form of a TensorDict of tensors and TensorDicts."""
    return form == "tensor" or (form[0] == "tensordict" and all(_is_plain(below) for _, below in form[1]))


def _form(data: Any, path: tuple[str, ...], ndim: int, found: dict[tuple[str, ...], torch.Tensor]) -> Form:
    if isinstance(data, torch.Tensor | np.ndarray | np.generic | bool | int | float):
        found[path] = _tensor(data)
        return "tensor"
    if data is None and path:
        return "none"
    is_class = is_a_class(data)
    if is_class or (isinstance(data, TensorDictBase) and not isinstance(data, NonTensorStack)):
        inner = [[name, _form(value, (*path, name), ndim, found)] for name, value in data.items()]
        extra = max(0, len(data.batch_size) - ndim)
        return ["tensorclass", remember(type(data)), inner, extra] if is_class else ["tensordict", inner, extra]
    if not is_structure(data):
        raise TypeError(_no_leaf(data, path))
    names = [name for name, _ in _entries(data)]
    if any(not isinstance(name, str | int) for name in names) or len({str(name) for name in names}) < len(names):
        raise TypeError(f"data: expected keys that are text or integers, each once, got {names}. Use a ListStorage.")
    inner = [[name, _form(value, (*path, str(name)), ndim, found)] for name, value in _entries(data)]
    if isinstance(data, Mapping):
        return ["dict", inner]
    if isinstance(data, list) or type(data) is tuple:
        return [type(data).__name__, inner]
    kind, name = type(data), f"{type(data).__module__}.{type(data).__qualname__}"
    _classes[name] = kind
    return ["namedtuple" if isinstance(data, tuple) else "dataclass", name, inner]


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return as_tensor(value)
    return torch.tensor(value, device="cpu")


def _no_leaf(value: Any, path: tuple[str, ...]) -> str:
    where = f" in {unravel(path)!r}" if path else ""
    return (
        f"data: expected a TensorDict or tensor, or a structure of tensors, arrays and numbers, got "
        f"{type(value).__name__}{where}. Use a ListStorage, which keeps any objects, or a RaggedStorage for "
        "TensorDicts with text."
    )


def restored(data: TensorDictBase, form: Form) -> Any:
    """What :func:`packed` was given, of other elements: TensorDicts ``[*batch]`` in the form of what they were.

    Classes that this process does not know (nothing of theirs was written here) become tuples, dictionaries and
    TensorDicts.

    >>> restored(*packed([torch.tensor(3), {"a": torch.tensor(4)}], 0))
    [tensor(3), {'a': tensor(4)}]
    """
    return _restored(leaves(data), (), form, tuple(data.batch_size), True)


def _restored(
    found: Mapping[NestedKey, torch.Tensor], path: tuple[str, ...], form: Form, batch: tuple[int, ...], is_root: bool
) -> Any:
    if form == "tensor":
        return found[unravel(path)]
    if form == "none":
        return None
    kind = form[0]
    inner = form[2] if isinstance(form[1], str) else form[1]
    values = {name: _restored(found, (*path, str(name)), below, batch, False) for name, below in inner}
    if kind in ("tensordict", "tensorclass"):
        size = batch if is_root else _size_of(values, batch, form[-1])
        td = TensorDict(values, batch_size=size)
        cls: Any = class_at(form[1]) if kind == "tensorclass" else None
        return td if cls is None else cls.from_tensordict(td)
    if kind == "dict":
        return values
    if kind in ("list", "tuple"):
        return list(values.values()) if kind == "list" else tuple(values.values())
    make: Any = _classes.get(form[1])
    if kind == "namedtuple":
        return tuple(values.values()) if make is None else make(*values.values())
    return values if make is None else make(**values)


def _size_of(values: Mapping[str, Any], batch: tuple[int, ...], extra: int) -> tuple[int, ...]:
    """The batch size of a TensorDict below the root: that of the elements, and ``extra`` dimensions of its own."""
    shapes = [value.shape for value in values.values() if hasattr(value, "shape")]
    return tuple(shapes[0][: len(batch) + extra]) if extra and shapes else batch


class _Pieces(list[Any]):
    """Batches to be written one after the other, and published at once."""


def pieces(batches: Sequence[Any]) -> list[Any]:
    """Mark batches as parts of one write, see :meth:`Storage.append`."""
    return _Pieces(batches)


def batches_of(data: Any) -> list[Any]:
    """The batches in data for :meth:`Storage.append`: one, or those of :func:`pieces`."""
    return data if isinstance(data, _Pieces) else [data]


def items_of(data: Any, dim: int) -> list[Any]:
    """The rows in data for :meth:`Storage.append`, one by one; they share memory with it.

    Raises:
        TypeError: it is neither a tensor, an array, a TensorDict, nor a list of elements.
        ValueError: it is one element.
    """
    return [item for batch in batches_of(data) for item in _unbound(batch, dim)]


def items_that_fit(data: Any, dim: int, max_size: int) -> tuple[list[Any], int]:
    """The rows in data that a storage of so many keeps, the last ones, and how many others there are.

    Raises:
        ValueError: there is none; or see :func:`items_of`.
    """
    items = items_of(data, dim)
    if not items:
        raise ValueError("data: expected at least one element, got none.")
    skipped = max(0, len(items) - max_size)
    return items[skipped:], skipped


def items_in_place(data: Any, number: int) -> list[Any]:
    """The rows in data, one by one, that replace so many.

    Raises:
        ValueError: there are more, or fewer.
    """
    items = items_of(data, 0)
    if len(items) != number:
        raise ValueError(f"data: expected {number} elements to replace as many, got {len(items)}.")
    return items


def num_rows(data: Any, dim: int) -> int:
    """Rows in data for :meth:`Storage.append`."""
    if isinstance(data, _Pieces):
        return sum(num_rows(batch, dim) for batch in data)
    if isinstance(data, torch.Tensor) or is_tensor_collection(data):
        return int(data.shape[dim])
    return len(data) if isinstance(data, list) else len(_unbound(data, dim))


def _unbound(batch: Any, dim: int) -> list[Any]:
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        batch = torch.from_numpy(batch)
    if isinstance(batch, torch.Tensor) or is_tensor_collection(batch):
        if batch.ndim <= dim:
            raise ValueError(
                f"data: expected a batch with at least {dim + 1} dimensions, got a {type(batch).__name__} of shape "
                f"{list(batch.shape)}. Pass one element to add()."
            )
        return list(batch.unbind(dim))
    rows = None if isinstance(batch, list) or not is_structure(batch) else unbound(batch, dim)
    if rows is not None:
        return rows
    if isinstance(batch, Mapping) or not isinstance(batch, Sequence) or isinstance(batch, str):
        raise TypeError(
            f"data: expected a TensorDict, a tensor, a list of elements, or a dictionary or tuple whose tensors have "
            f"as many rows, got {type(batch).__name__}. "
            "Pass one element to add()."
        )
    return list(batch)


def too_long(frames: int, room: int) -> ValueError:
    """The error over a trajectory that a storage has no room for."""
    return ValueError(
        f"data: a trajectory of {frames} frames is longer than the storage, which has room for {room}. Make the "
        "storage larger, or end trajectories with max_frames_per_traj."
    )


def no_objects(name: str, keys: Sequence[NestedKey], storage: str) -> str:
    """The message for entries that a storage of tensors cannot keep."""
    quoted = ", ".join(repr(key) for key in keys)
    return (
        f"{name}: {storage} keeps tensors only, got text or other objects in {key_str(keys)}. Use a "
        f"RaggedStorage or a ListStorage, which keep them, or leave them out: data.exclude({quoted}); in a collector "
        f"postproc=lambda data: data.exclude({quoted}), or an environment without them "
        "(gymnasium.wrappers.FilterObservation)."
    )


positive = cast("Callable[[str, Any], int]", whole(1).call)
"""``positive(name, value)``: an integer of at least 1; a TypeError or ValueError, which names it, where it is none."""


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READ_ONLY = (torch.uint16, torch.uint32, torch.uint64)  # torch reads them at indices, and cannot write them


class Column:
    """Takes and puts rows of a tensor at indices.

    Takes on the CPU through NumPy, which costs a call less and takes fresh memory in huge pages where it is large.

    Args:
        rows: ``[n, ...]``.

    Example:
        >>> Column(torch.arange(6.0).reshape(3, 2)).take(np.array([2, 0]))
        tensor([[4., 5.],
                [0., 1.]])
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._plain = in_numpy(rows.dtype)
        self._array = None
        if rows.device.type == "cpu":
            self._array = (rows if self._plain else rows.view(_BITS[rows.dtype.itemsize])).numpy()

    def take(self, index: NDArray[np.int64]) -> torch.Tensor:
        """A copy of the rows at ``index``."""
        if self._array is None:
            return self.rows.index_select(0, torch.from_numpy(index).to(self.rows.device))
        taken = torch.from_numpy(self._array.take(index, axis=0))
        return taken if self._plain else taken.view(self.rows.dtype)

    def put(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows at ``index``, int64 ``[n]``; where one is named twice, by either of its values.

        Args:
            index: on the device of the rows, as ``values`` are.
            values: ``[n, ...]``, of the dtype of the rows.
        """
        rows = self.rows
        if rows.dtype in _READ_ONLY:
            bits = _BITS[rows.dtype.itemsize]
            rows, values = rows.view(bits), values.view(bits)
        rows[index] = values


class TensorDictBuilder:
    """Makes TensorDicts of the same keys from lists of tensors.

    What the constructor of ``TensorDict`` finds out and tests each time (how keys are nested, that shapes begin with
    the batch size) is known here. That is most of the cost of a small batch.

    Args:
        keys: of the entries, in the order in which tensors will come.

    Example:
        >>> builder = TensorDictBuilder(["a", ("b", "c")])
        >>> td = builder.build([torch.zeros(3), torch.ones(3, 2)], (3,), torch.device("cpu"))
        >>> td["b", "c"].shape, td.batch_size
        (torch.Size([3, 2]), torch.Size([3]))
    """

    def __init__(self, keys: Iterable[NestedKey]) -> None:
        paths = [as_tuple(key) for key in keys]
        above = sorted({path[:depth] for path in paths for depth in range(len(path))}, key=len)
        places = {path: number for number, path in enumerate(above)}
        self._count = max(len(above), 1)
        self._entries = [(places[path[:-1]], path[-1]) for path in paths]
        inner = reversed(above[1:])  # the deepest first, so that each is whole when it goes into the one above
        self._inner = [(places[path], places[path[:-1]], path[-1]) for path in inner]

    def build(self, values: Iterable[torch.Tensor], batch: tuple[int, ...], device: torch.device) -> TensorDict:
        """A TensorDict ``[*batch]``.

        Args:
            values: ``[*batch, ...]`` each, on ``device``.
            batch: batch size.
            device: of the values.
        """
        batch_size = torch.Size(batch)
        levels: list[dict[Any, Any]] = [{} for _ in range(self._count)]
        for (level, name), value in zip(self._entries, values, strict=True):
            levels[level][name] = value
        for level, above, name in self._inner:
            levels[above][name] = unchecked_td(levels[level], batch_size, device=device)
        return unchecked_td(levels[0], batch_size, device=device)
