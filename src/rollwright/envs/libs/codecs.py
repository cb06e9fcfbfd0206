"""Arrays of gymnasium spaces to tensors of specs and back: what to do with each entry is decided once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright._warnings import warn_user
from rollwright.data.specs import Binary, Composite, MultiOneHot, OneHot, TensorSpec
from rollwright.data.specs.conversion import Leaf, numpy_dtype
from rollwright.errors import SpecError

__all__ = ["ActionWriter", "ObservationReader", "spec_of"]

Batch = tuple[int, ...]
_MOST_ROWS = 1024  # of a table of one-hot rows


def spec_of(leaves: list[Leaf], batch: Batch) -> Composite:
    """The Composite of the entries, each with the batch's dimensions in front."""
    spec = Composite(shape=batch)
    for leaf in leaves:
        spec.set(leaf.key, leaf.spec.expand((*batch, *leaf.spec.shape)) if batch else leaf.spec)
    return spec


# From the environment ------------------------------------------------------------------------------


class ReadArray:
    """A Box or MultiBinary value as an array of its own memory.

    Other floating-point numbers than those of the space are cast, with one warning.
    """

    def __init__(self, leaf: Leaf, batch: Batch) -> None:
        self.key = leaf.key
        self.shape = (*batch, *(leaf.space.shape or ()))
        self.dtype = np.dtype(leaf.space.dtype)
        self.out_dtype = numpy_dtype(_dtype(leaf.spec))
        self.casts = self.dtype != self.out_dtype
        self.also = self.dtype  # what else was cast before (not None: NumPy takes that for float64)

    def __call__(self, value: Any) -> NDArray[Any]:
        if type(value) is not np.ndarray or value.dtype != self.dtype or value.shape != self.shape:
            if type(value) is np.ndarray and value.dtype == self.also and value.shape == self.shape:
                return value.astype(self.out_dtype, "C")
            value = admit(self._cast(value), self.dtype, self.shape)
        # A copy: environments may write into their arrays later.
        copied: NDArray[Any] = value.astype(self.out_dtype, "C") if self.casts else value.copy()
        return copied

    def write(self, value: Any, rows: NDArray[Any], i: int) -> None:
        """Write what a call returns into row ``i``."""
        if type(value) is np.ndarray and value.dtype == self.dtype and value.shape == self.shape:
            rows[i] = value
        else:
            rows[i] = self(value)

    def _cast(self, value: Any) -> Any:
        if self.dtype.kind != "f" or not isinstance(value, np.ndarray | np.generic):
            return value
        if value.dtype.kind != "f" or value.dtype == self.dtype:
            return value
        if self.also == self.dtype:
            self.also = value.dtype
            warn_user(
                f"observation {self.key!r} has dtype {value.dtype}; its space says {self.dtype}. It is cast with every "
                f"step. Return it with .astype(np.{self.dtype}), or change the space.",
                UserWarning,
            )
        return value.astype(self.dtype)


def admit(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """What is no array of the right kind at once: Python numbers and lists pass, wrong arrays do not."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise SpecError(f"is not an array ({error}); its space says {dtype} {list(shape)}.") from error
    if array.shape != shape:
        raise SpecError(
            f"has shape {list(array.shape)}; its space says {list(shape)}. Reshape the value, or change the space."
        )
    typed = isinstance(value, (np.ndarray, np.generic))
    if array.dtype != dtype and (typed or not np.can_cast(array.dtype, dtype, "same_kind")):
        raise SpecError(
            f"has dtype {array.dtype}; its space says {dtype}. Cast the value with .astype(np.{dtype}), or "
            "change the space."
        )
    return array.astype(dtype)


class ReadIndex:
    """A Discrete or MultiDiscrete value as one-hot rows or as integers that begin at 0."""

    def __init__(self, leaf: Leaf, batch: Batch) -> None:
        nvec, start = _choices(leaf.space)
        self.nvec, self.start = nvec, start
        self.shape = (*batch, *(leaf.space.shape or ()))
        self.dtype = numpy_dtype(_dtype(leaf.spec))
        self.one_hot = _is_one_hot(leaf.spec)
        # Rows to copy; of very many choices each row is written when it is needed.
        self.tables = [
            np.eye(n, dtype=self.dtype) if self.one_hot and n <= _MOST_ROWS else None for n in self.nvec.flat
        ]
        self._single = None  # the rows of one choice, by a plain integer
        if self.shape == () and int(nvec) <= _MOST_ROWS:
            self._single = self.tables[0] if self.one_hot else np.arange(int(nvec), dtype=self.dtype)
        self._first = int(start) if self.shape == () else 0

    def __call__(self, value: Any) -> NDArray[Any]:
        if self._single is not None and (type(value) is int or isinstance(value, np.integer)):
            at = int(value) - self._first
            if 0 <= at < len(self._single):
                return np.array(self._single[at])
        index = np.asarray(value)
        if index.dtype.kind not in "iub" or index.shape != self.shape:
            raise SpecError(
                f"is {value!r}; its space says integers of shape {list(self.shape)}. Return them so, or "
                "change the space."
            )
        index = index.astype(np.int64) - self.start
        if (index < 0).any() or (index >= self.nvec).any():
            raise SpecError(
                f"is {value!r}, outside of its space, which has {self.nvec.tolist()} choices that begin at "
                f"{self.start.tolist()}. Correct the value, or change the space."
            )
        if not self.one_hot:
            return np.array(index, self.dtype)
        if self.nvec.ndim == 0:
            return self._rows(0, index)
        return np.concatenate([self._rows(i, index[..., i]) for i in range(len(self.tables))], -1)

    def write(self, value: Any, rows: NDArray[Any], i: int) -> None:
        """Write what a call returns into row ``i``."""
        rows[i] = self(value)

    def _rows(self, i: int, index: NDArray[Any]) -> NDArray[Any]:
        """The one-hot rows of choice number ``i``, ``[*index, n]``."""
        table = self.tables[i]
        if table is not None:
            return np.array(table[index])
        rows = np.zeros((*index.shape, int(self.nvec.flat[i])), self.dtype)
        np.put_along_axis(rows, index[..., None], 1, -1)
        return rows


class ReadObject:
    """A value that no tensor holds: text, graphs, sequences."""

    def __init__(self, leaf: Leaf, batch: Batch) -> None:
        self.batched = bool(batch)

    def __call__(self, value: Any) -> Any:
        value = value if type(value) is str else copy.deepcopy(value)
        return NonTensorStack(*map(NonTensorData, value)) if self.batched else NonTensorData(value)


class ObservationReader:
    """Raw observations as arrays by key; objects that no array holds become non-tensor data.

    Attributes:
        entries: key, place in the raw value and converter of each observation.
        plain_array: key, dtype and shape of a raw value that is the one entry as it is; no dtype: there is no such.
        plain_dtype: of that entry.
    """

    def __init__(self, leaves: list[Leaf], batch: Batch) -> None:
        self.entries = [(leaf.key, leaf.path, _reader(leaf, batch)) for leaf in leaves]
        self._only = _only(self.entries)
        self.plain_array: tuple[NestedKey, Any, Any] = ("", None, None)
        self.plain_dtype: Any = None
        if self._only is not None and isinstance(read := self._only[1], ReadArray):
            self.plain_array, self.plain_dtype = (self._only[0], read.dtype, read.shape), read.out_dtype

    def __call__(self, raw: Any) -> dict[NestedKey, Any]:
        """Convert.

        Raises:
            SpecError: an entry has another shape or dtype than in its space.
            KeyError: an entry is missing.
        """
        key: NestedKey = ""
        try:
            if self._only is not None:
                key, read = self._only
                return {key: read(raw)}
            out: dict[NestedKey, Any] = {}
            for key, path, read in self.entries:
                out[key] = read(_at(raw, path, key))
            return out
        except SpecError as error:
            raise SpecError(f"{key!r} {error}") from error

    def write(self, raw: Any, out: Mapping[NestedKey, NDArray[Any]], i: int) -> None:
        """Write what a call returns into row ``i`` of arrays by key; there are no objects among the entries.

        Raises:
            SpecError, KeyError: see a call.
        """
        key: NestedKey = ""
        try:
            if self._only is not None:
                key, read = self._only
                read.write(raw, out[key], i)
                return
            for key, path, read in self.entries:
                read.write(_at(raw, path, key), out[key], i)
        except SpecError as error:
            raise SpecError(f"{key!r} {error}") from error


def _at(raw: Any, path: tuple[Any, ...], key: NestedKey) -> Any:
    """The part of a raw value that is the entry ``key``."""
    try:
        for part in path:
            raw = raw[part]
    except (KeyError, IndexError, TypeError) as error:
        raise KeyError(key) from error
    return raw


def _only(entries: list[tuple[NestedKey, tuple[Any, ...], Any]]) -> tuple[NestedKey, Any] | None:
    """Key and converter of the one entry that is the raw value itself: by far the most frequent case."""
    return (entries[0][0], entries[0][2]) if len(entries) == 1 and entries[0][1] == () else None


# To the environment --------------------------------------------------------------------------------


class WriteBox:
    """A tensor as a Box value: a fresh array, all finite."""

    def __init__(self, leaf: Leaf, batch: Batch) -> None:
        self.shape = (*batch, *leaf.spec.shape)
        self.dtype = np.dtype(leaf.space.dtype)

    def __call__(self, array: NDArray[Any]) -> NDArray[Any]:
        _check_form(array, self.shape, "biuf" if self.dtype.kind == "f" else "biu", str(self.dtype))
        if self.dtype.kind != "f":
            return self._whole(array)
        if np.count_nonzero(np.isfinite(array)) != array.size:  # cheaper than all()
            raise SpecError(
                f"holds NaN or infinity{_where(~np.isfinite(array))}: {_short(array)}. Check "
                "the policy's output: a diverging loss or an unscaled observation is the usual cause."
            )
        return np.array(array, self.dtype)

    def _whole(self, array: NDArray[Any]) -> NDArray[Any]:
        cast_down = array.astype(self.dtype)
        if (cast_down != array).any():
            raise SpecError(
                f"must hold integers that {self.dtype} can hold, got {_short(array)} of dtype {array.dtype}. Cast or "
                "clamp it in the policy."
            )
        return cast_down


class WriteBinary:
    """A tensor of zeros and ones as a MultiBinary value."""

    def __init__(self, leaf: Leaf, batch: Batch) -> None:
        self.shape = (*batch, *leaf.spec.shape)
        self.dtype = np.dtype(leaf.space.dtype)

    def __call__(self, array: NDArray[Any]) -> NDArray[Any]:
        _check_form(array, self.shape)
        if not ((array == 0) | (array == 1)).all():
            raise SpecError(f"must hold zeros and ones, got {_short(array)}.")
        return array.astype(self.dtype)


class WriteIndex:
    """One-hot rows or integers from 0 as a Discrete or MultiDiscrete value.

    Other rows than one-hot ones (scores, logits) stand for their largest element, with one warning.
    """

    def __init__(self, leaf: Leaf, batch: Batch) -> None:
        self.key = leaf.key
        self.warned = False
        self.nvec, self.start = _choices(leaf.space)
        self.shape = (*batch, *leaf.spec.shape)
        self.raw_shape = (*batch, *(leaf.space.shape or ()))
        self.dtype = np.dtype(leaf.space.dtype)
        self.one_hot = _is_one_hot(leaf.spec)
        self.as_int = not self.raw_shape
        self.kinds = ("biufc", "") if self.one_hot else ("biu", "integers")
        self.limits = self.nvec.astype(np.uint64)
        self.shifted = bool(self.start.any())
        self.first, self.choices = (int(self.start), int(self.nvec)) if self.as_int else (0, 0)

    def __call__(self, array: NDArray[Any]) -> Any:
        if array.shape != self.shape or array.dtype.kind not in self.kinds[0]:
            _check_form(array, self.shape, *self.kinds)
        if not self.as_int:
            index = self._place_of_one(array) if self.one_hot else self._in_range(array)
            return (index + self.start if self.shifted else index).astype(self.dtype, copy=False)
        if not self.one_hot:
            place = int(array)
            return (place if 0 <= place < self.choices else int(self._in_range(array))) + self.first
        (hot,) = array.nonzero()
        found = len(hot) == 1 and array[hot[0]] == 1
        return int(hot[0] if found else self._place_of_largest(array, array)) + self.first

    def _place_of_one(self, array: NDArray[Any]) -> NDArray[Any]:
        if self.nvec.ndim == 0:  # the same as below, of one block
            index: NDArray[Any] = array.argmax(-1)
            if np.count_nonzero(array) != index.size or np.count_nonzero(array.max(-1) == 1) != index.size:
                return self._place_of_largest(array, array)
            return index
        places = []
        for block in np.split(array, self.nvec.reshape(-1).cumsum()[:-1], -1):
            hot = block == 1
            if ((hot.sum(-1) != 1) | ((block != 0).sum(-1) != 1)).any():
                places.append(self._place_of_largest(block, array))
            else:
                places.append(hot.argmax(-1))
        return np.stack(places, -1).reshape(self.raw_shape)

    def _place_of_largest(self, block: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
        """The first of the largest elements of each row of ``block``, a part of ``array``."""
        wrong = ~np.isfinite(block.max(-1))  # NaN is the largest; -inf is a score of what is never chosen
        if wrong.any():
            raise SpecError(
                f"must be one-hot, or numbers of which the largest is finite, got {_short(array)}{_where(wrong)}. "
                "Check the policy's output: a diverging loss or an unscaled observation is the usual cause."
            )
        if not self.warned:
            warn_user(
                f"action {self.key!r} is not one-hot, a single 1 among {self.nvec.tolist()}, but {_short(array)}: its "
                "largest element is played, here and from now on. Let the policy write one-hot actions "
                "(OneHotCategorical, QValueActor), or create the environment with categorical_action_encoding=True and "
                "write integers.",
                UserWarning,
            )
            self.warned = True
        index: NDArray[Any] = block.argmax(-1)
        return index

    def _in_range(self, array: NDArray[Any]) -> NDArray[Any]:
        index = array.astype(np.int64)
        # As unsigned numbers, negative ones are large.
        if index.size and np.count_nonzero(index.view(np.uint64) < self.limits) == index.size:
            return index
        wrong = (index < 0) | (index >= self.nvec)
        if wrong.any():
            raise SpecError(f"must lie in 0 .. {(self.nvec - 1).tolist()}, got {_short(array)}{_where(wrong)}.")
        return index


class WriteObject:
    """An object as it is."""

    def __init__(self, leaf: Leaf, batch: Batch) -> None:
        self.batched = bool(batch)

    def __call__(self, value: Any) -> Any:
        return tuple(value) if self.batched else value


class ActionWriter:
    """The actions of a step as a raw value of the action space.

    Attributes:
        entries: key, place in the raw value and converter of each action.
    """

    def __init__(self, space: Space[Any], leaves: list[Leaf], batch: Batch) -> None:
        self.space = space
        self.entries = [(leaf.key, leaf.path, _writer(leaf, batch)) for leaf in leaves]
        self._only = _only(self.entries)
        self._made = _maker(space, (), {leaf.path: i for i, leaf in enumerate(leaves)})
        self._plain_numbers = [isinstance(leaf.space, spaces.Discrete) for leaf in leaves]

    def rows(self, values: Mapping[Any, Any]) -> Sequence[Any]:
        """The actions of a batch as a raw value for each row.

        Raises:
            SpecError: an action that the environments cannot take, or that is no array; or there are none.
        """
        if not self.entries:
            raise SpecError("is missing: the space has no entries.")
        parts: list[Sequence[Any]] = []
        for (key, _, write), plain in zip(self.entries, self._plain_numbers, strict=True):
            if type(value := values.get(key, None)) is not np.ndarray:
                raise SpecError("is no array.")
            written = write(value)
            if plain:
                parts.append(written.tolist())
            else:  # with the dots, numbers are arrays too
                parts.append([written[i, ...] for i in range(len(written))] if written.ndim == 1 else list(written))
        return parts[0] if self._only is not None else list(map(self._made, zip(*parts, strict=True)))

    def __call__(self, values: Mapping[Any, Any] | TensorDictBase) -> Any:
        """Convert the actions among ``values``, tensors or arrays by key.

        Raises:
            SpecError: an action that the environment cannot take.
            KeyError: an action is missing.
        """
        key: NestedKey = ""
        try:
            if self._only is not None:
                key, write = self._only
                if type(value := values.get(key, None)) is np.ndarray:
                    return write(value)
            written = []
            for key, _, write in self.entries:
                value = values.get(key, None)
                if value is None:
                    raise KeyError(key)
                if isinstance(value, Tensor):
                    value = in_numpy_dtype(value.detach().cpu()).numpy()
                elif type(value) is not np.ndarray:
                    if not isinstance(write, WriteObject):
                        raise SpecError(f"must be a tensor, got {type(value).__name__}.")
                    value = value.tolist()  # non-tensor data: the object itself, or a list of them
                written.append(write(value))
        except SpecError as error:
            raise SpecError(f"{key!r} {error}") from error
        return self._made(written)


def in_numpy_dtype(value: Tensor) -> Tensor:
    """A tensor of a dtype that NumPy has, which holds the same numbers."""
    return value.float() if value.dtype is torch.bfloat16 else value


def _maker(
    space: Space[Any], path: tuple[Any, ...], places: Mapping[tuple[Any, ...], int]
) -> Callable[[Sequence[Any]], Any]:
    """What makes a raw value of ``space`` from those of its leaves, which are in ``places`` by path."""
    if isinstance(space, spaces.Dict):
        named = [(name, _maker(child, (*path, name), places)) for name, child in space.spaces.items()]
        return lambda values: {name: make(values) for name, make in named}
    if isinstance(space, spaces.Tuple):
        makers = [_maker(child, (*path, i), places) for i, child in enumerate(space.spaces)]
        return lambda values: tuple([make(values) for make in makers])
    return itemgetter(places[path])


# ----------------------------------------------------------------------------------------------------


def _reader(leaf: Leaf, batch: Batch) -> Any:
    if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
        return ReadIndex(leaf, batch)
    if isinstance(leaf.space, (spaces.Box, spaces.MultiBinary)):
        return ReadArray(leaf, batch)
    return ReadObject(leaf, batch)


def _writer(leaf: Leaf, batch: Batch) -> Callable[[Any], Any]:
    if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
        return WriteIndex(leaf, batch)
    if isinstance(leaf.spec, Binary):
        return WriteBinary(leaf, batch)
    if isinstance(leaf.space, spaces.Box):
        return WriteBox(leaf, batch)
    return WriteObject(leaf, batch)


def _choices(space: Space[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Numbers of outcomes and of the first outcome, shaped as the space."""
    if isinstance(space, spaces.MultiDiscrete):
        return np.asarray(space.nvec, np.int64), np.asarray(space.start, np.int64)
    return np.asarray(space.n, np.int64), np.asarray(space.start, np.int64)  # type: ignore[attr-defined]


def _dtype(spec: TensorSpec) -> torch.dtype:
    return cast(torch.dtype, spec.dtype)


def _is_one_hot(spec: TensorSpec) -> bool:
    return isinstance(spec, (OneHot, MultiOneHot))


def _check_form(array: NDArray[Any], shape: tuple[int, ...], kinds: str = "biufc", wanted: str = "") -> None:
    """Test shape and kind of dtype together, ``wanted`` in words."""
    is_shape, is_kind = array.shape == shape, array.dtype.kind in kinds
    if not is_shape or not is_kind:
        found = [*([] if is_shape else [f"shape {list(array.shape)}"]), *([] if is_kind else [f"dtype {array.dtype}"])]
        expected = [*([] if is_shape else [str(list(shape))]), *([] if is_kind else [wanted])]
        remedy = " and ".join([*([] if is_shape else ["Reshape"]), *([] if is_kind else ["Cast"])]).capitalize()
        raise SpecError(f"has {' and '.join(found)}, expected {' of '.join(expected)}. {remedy} it in the policy.")


def _where(wrong: NDArray[Any]) -> str:
    """The first place that is wrong, for a message; nothing for values of one element."""
    return "" if wrong.size == 1 else f" (first at index {list(map(int, np.argwhere(wrong)[0]))})"


def _short(array: NDArray[Any]) -> str:
    return np.array2string(array, threshold=20, edgeitems=3, separator=", ").replace("\n", "")
