"""Functions on columns, tensors or NumPy arrays in row form, and functions of one entry on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.conversion import numpy_dtype
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry, Rows, Values
from rollwright.errors import EnvError, NotNative

Columns = Values | TensorDictBase


class TensorKind:
    """Columns that are tensors.

    Args:
        like: has their batch size and device.
        batch_ndim: called for the dimensions that specs have in front, for the batch.
    """

    def __init__(self, like: TensorDictBase, batch_ndim: Callable[[], int]) -> None:
        self._like, self._ndim = like, batch_ndim

    @property
    def batch(self) -> torch.Size:
        """Their batch size."""
        return self._like.batch_size

    @property
    def device(self) -> torch.device | None:
        """Of new ones; None: that of their specs."""
        return self._like.device

    def full(self, spec: TensorSpec, value: Any) -> torch.Tensor:
        """A column of one value."""
        shape = (*self.batch, *spec.shape[self._ndim() :])
        return torch.full(shape, value, dtype=spec.dtype, device=self.device or spec.device or "cpu")

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the transform's own as a column that keeps its last dimension."""
        device = self.device
        return tensor if device is None else tensor.to(device)

    def column(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the transform's own as a column."""
        return self.whole(tensor)

    def tensor(self, index: int, column: torch.Tensor) -> torch.Tensor:
        """A column that is read, of the transform's entry at ``index``, as a tensor of its whole shape."""
        return column

    def array(self, index: int, column: torch.Tensor) -> torch.Tensor:
        """The same where an array will do."""
        return column

    def flags(self, column: torch.Tensor) -> torch.Tensor:
        """The same for flags."""
        return column

    def kept(self, column: torch.Tensor) -> torch.Tensor:
        """A copy of a column that is handed out, and may then be changed in place."""
        return column.clone()


class ArrayKind:
    """Columns that are NumPy arrays in row form, which nobody writes into.

    Args:
        batch: their batch size.
        forms: of the entries that the transform reads as tensors.
    """

    device = torch.device("cpu")

    def __init__(self, batch: tuple[int, ...], forms: Sequence[Entry] = ()) -> None:
        self.batch, self._forms = torch.Size(batch), forms
        self._known: dict[tuple[Any, ...], Any] = {}

    def full(self, spec: TensorSpec, value: Any) -> Any:
        """A column of one value."""
        known = self._known.get((id(spec), value))
        if known is None:
            column = self.column(torch.full(self._shape(spec), value, dtype=spec.dtype, device="cpu"))
            known = self._known[id(spec), value] = spec, column  # whose id is that of no other one then
        return known[1]

    def whole(self, tensor: torch.Tensor) -> Any:
        """A tensor of the transform's own as a column that keeps its last dimension."""
        return tensor.numpy()

    def column(self, tensor: torch.Tensor) -> Any:
        """A tensor of the transform's own as a column."""
        array = self.whole(tensor)
        return row_form(array) if array.shape == (*self.batch, 1) else array

    def entry(self, spec: TensorSpec | torch.Tensor) -> Entry:
        """Shape and dtype of :meth:`column`."""
        dtype = np.dtype(numpy_dtype(spec.dtype or torch.float32))
        shape = self._shape(spec)
        return Entry(shape, dtype, shape == (*self.batch, 1))

    def _shape(self, spec: TensorSpec | torch.Tensor) -> tuple[int, ...]:
        return (
            *self.batch,
            *spec.shape[len(self.batch) :],
        )  # specs are of all environments, of which this may be a part

    def tensor(self, index: int, column: Any) -> torch.Tensor:
        """See :class:`TensorKind`; over the memory of an array that is no column."""
        array = self.array(index, column)
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def array(self, index: int, column: Any) -> Any:
        """A column that is read, of the transform's entry at ``index``, as an array of its whole shape."""
        form = self._forms[index]
        return np.asarray(column, form.dtype).reshape(form.shape) if form.column else np.asarray(column)

    def flags(self, column: Any) -> torch.Tensor:
        """The same for flags."""
        flags = torch.from_numpy(np.array(column))
        return flags.unsqueeze(-1) if flags.ndim == len(self.batch) else flags

    def kept(self, column: Any) -> Any:
        """The column itself."""
        return column


def row_form(array: Any) -> Any:
    """A column without its last dimension; a number of a single environment."""
    return array[0] if array.ndim == 1 else array[..., 0]


def quiet(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of arrays that warns of no overflow, as one of tensors."""

    def call(value: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(value)

    return call


# What tensors and arrays do by other names ------------------------------------------------------------


def cast(value: Any, dtype: Any) -> Any:
    """Values of another dtype, which is one of torch, or that of an array."""
    return value.to(dtype) if isinstance(value, torch.Tensor) else value.astype(_of_numpy(dtype))


@cache
def _of_numpy(dtype: Any) -> Any:
    return np.dtype(numpy_dtype(dtype)) if isinstance(dtype, torch.dtype) else dtype


def join(values: list[Any], dim: int) -> Any:
    """``torch.cat``."""
    return torch.cat(values, dim) if isinstance(values[0], torch.Tensor) else np.concatenate(values, dim)


def at_least(value: Any, low: float) -> Any:
    """``torch.clamp_min``."""
    return value.clamp_min(low) if isinstance(value, torch.Tensor) else np.maximum(value, low)


def total(value: Any, ndim: int) -> Any:
    """The sum over the first ``ndim`` dimensions, in the order in which torch adds."""
    if not ndim:
        return value
    if isinstance(value, torch.Tensor):
        return value.sum(tuple(range(ndim)))
    return total(torch.from_numpy(value), ndim).numpy()


def root(value: Any) -> Any:
    """The square root, in place: torch's, since that of NumPy is another one in the last bit."""
    (value if isinstance(value, torch.Tensor) else torch.from_numpy(value)).sqrt_()
    return value


def clip(value: Any, low: float | None, high: float | None) -> Any:
    """``torch.clamp`` of floating-point numbers; -0.0 and NaN stay."""
    if isinstance(value, torch.Tensor):
        return value.clamp(low, high)
    kind = value.dtype.type
    if low and high:
        return np.minimum(np.maximum(value, kind(low)), kind(high))
    if low is not None:
        value = np.where(value < low, kind(low), value)
    return value if high is None else np.where(value > high, kind(high), value)


def sign(value: Any) -> Any:
    """``torch.sign`` of floating-point numbers: of NaN, 0."""
    if isinstance(value, torch.Tensor):
        return value.sign()
    return np.subtract(value > 0, value < 0, dtype=value.dtype)


Apply = Callable[[torch.Tensor], torch.Tensor]


def on_array(function: Apply) -> Callable[[Any], Any]:
    """A function of tensors, as one of arrays."""

    def call(value: Any) -> Any:
        array = np.asarray(value)
        return function(torch.from_numpy(array if array.flags.writeable else array.copy())).numpy()

    return call


def by_entries(
    name: str,
    env: ArrayEnv,
    pairs: list[tuple[NestedKey, NestedKey]],
    change: Callable[[int, NestedKey, Entry, bool], tuple[Entry, Callable[..., Any]]],
    *,
    restarts: bool = False,
) -> ArrayTransform:
    """The array form of a transform that changes one entry after another.

    Args:
        name: of the transform, for messages.
        env: the environment that it follows.
        pairs: keys read and written, in order.
        change: for the place of a pair, the key that is written, the entry that is read, and whether that is a reward:
            what becomes of the entry, and the function of its values in row form.
        restarts: whether these functions take the rows of a reset, too.

    Raises:
        NotNative: an entry is neither an observation nor a reward.
    """
    entries: dict[NestedKey, Entry] = {}
    rewards: dict[NestedKey, Entry] = {}
    calls: list[tuple[NestedKey, NestedKey, Callable[..., Any]]] = []
    for index, (key, out_key) in enumerate(pairs):
        of_reward = key in env.rewards or key in rewards
        known, made = ({**env.rewards, **rewards}, rewards) if of_reward else ({**env.entries, **entries}, entries)
        if key not in known:
            raise NotNative(f"{name} changes {key!r}, which is neither an observation nor a reward")
        made[out_key], function = change(index, out_key, known[key], of_reward)
        calls.append((key, out_key, function))
    of_observations = [call for call in calls if call[1] in entries]

    def step(root: Values, out: Values) -> None:
        for key, out_key, function in calls:
            out[out_key] = function(out[key])

    def reset(fresh: Values, *rows: Rows | None) -> None:
        for key, out_key, function in of_observations:
            fresh[out_key] = function(fresh[key], *rows)

    return ArrayTransform(entries, [], step, reset, rewards, restart=reset if restarts else None)


def by_specs(
    name: str, apply: Apply, observations: Composite, rewards: Composite, ndim: int
) -> Callable[[int, NestedKey, Entry, bool], tuple[Entry, Callable[..., Any]]]:
    """A change for :func:`by_entries` by a function of tensors.

    Args:
        name: of the transform.
        apply: the function; it is given copies.
        observations: specs after the transform, which say what ``apply`` returns.
        rewards: likewise.
        ndim: dimensions of the batch.
    """

    def change(index: int, out_key: NestedKey, entry: Entry, of_reward: bool) -> tuple[Entry, Callable[..., Any]]:
        spec = rewards if of_reward else observations
        if out_key not in spec:
            raise NotNative(f"{name} writes {out_key!r}, which is neither an observation nor a reward")
        found = _entry_of(name, spec[out_key], ndim, of_reward or entry.column)
        return found, _checked(name, out_key, apply, entry, found)

    return change


def _entry_of(name: str, leaf: TensorSpec, batch_ndim: int, may_be_column: bool) -> Entry:
    if leaf.dtype is None or -1 in leaf.shape:
        raise NotNative(f"{name} writes what varies in shape, or objects")
    is_column = may_be_column and len(leaf.shape) == batch_ndim + 1 and leaf.shape[-1] == 1
    return Entry(tuple(leaf.shape), np.dtype(numpy_dtype(leaf.dtype)), is_column)


def _checked(name: str, key: NestedKey, apply: Apply, given: Entry, found: Entry) -> Callable[[Any], Any]:
    """``apply`` on values in row form, whose result is tested as that on TensorDicts is."""

    def call(value: Any) -> Any:
        result = apply(torch.from_numpy(np.array(value, given.dtype).reshape(given.shape))).numpy()
        if result.shape != found.shape or result.dtype != found.dtype:
            raise EnvError(
                f"{name}: its spec announces {key!r} as {found.dtype} {list(found.shape)}, got {result.dtype} "
                f"{list(result.shape)}. Correct transform_observation_spec or transform_reward_spec, or the result."
            )
        return result[..., 0][()] if found.column else result

    return call
