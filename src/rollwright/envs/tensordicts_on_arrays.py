"""TensorDicts where environments are on arrays: transforms that need them, and steps for whoever passes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaves, place
from rollwright._tensors import as_tensor
from rollwright.data.entries import unchecked_td
from rollwright.data.specs import Composite
from rollwright.envs.arrays import (
    FLAGS,
    ArrayEnv,
    ArrayTransform,
    Entry,
    Rows,
    Values,
    array_form,
    entries_of,
    objects_of,
)
from rollwright.errors import EnvError, NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase


_FLAG = np.dtype(np.bool_)
_NOTHING = unchecked_td({})


class Changes(Protocol):
    """A transform, as :class:`OnTensorDicts` calls it."""

    def transform_step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """What a step returned, changed."""

    def transform_reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """What a reset returned, changed."""


class Deviation(RollwrightError):
    """A transform returned something else than its specs announce; the message says what.

    Attributes:
        changed: what it returned.
    """

    def __init__(self, text: str, changed: TensorDictBase) -> None:
        super().__init__(text)
        self.changed = changed


class RootTensorDicts:
    """What a step or a reset begins from, as TensorDicts, for transforms that read it.

    Args:
        batch_size: of the environment.
        device: of the environment's TensorDicts.
        left_out: rewards, which no root holds.

    Attributes:
        forms: of the environment's entries, after all transforms.
    """

    def __init__(self, batch_size: torch.Size, device: torch.device | None, left_out: set[NestedKey]) -> None:
        self.batch_size, self.device = batch_size, device
        self.forms: dict[NestedKey, Entry] = {}
        self._left_out = left_out
        self._last: tuple[Values | None, TensorDict] = None, _NOTHING

    def of_step(self, root: Values) -> TensorDict:
        """The current TensorDict, with what the policy wrote; one for all transforms of a step."""
        if self._last[0] is not root:
            self._last = root, as_tensordict(root, self.forms, self.batch_size, self.device, left_out=self._left_out)
        return self._last[1]

    def of_rows(self, root: Values, number: int) -> list[TensorDict]:
        """The current TensorDict of each of ``number`` such environments, which share ``root``, ``[number, ...]``."""
        columns: dict[NestedKey, tuple[torch.Tensor, ...]] = {}
        for key, value in root.items():
            if key not in self._left_out:
                entry = self.forms.get(key)
                if entry is not None and entry.column:
                    entry = entry.replace(shape=(number, *entry.shape))
                columns[key] = _as_tensor(value, entry).unbind(0)
        rows = zip(*columns.values(), strict=True)
        return [_nested(dict(zip(columns, row, strict=True)), self.batch_size, self.device) for row in rows]

    def change(self, given: Values, change: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Change what a step is given by a function of a TensorDict, which changes that or returns another one.

        Raises:
            EnvError: it writes an entry of the environment that is a column in another form.
        """
        td = as_tensordict(given, self.forms, self.batch_size, self.device, left_out=self._left_out)
        before = leaves(td)
        after = leaves(change(td))
        for key, value in after.items():
            if before.get(key) is value:
                continue
            entry, array = self.forms.get(key), value.detach().cpu().numpy()
            if entry is None or not entry.column:
                given[key] = array
            elif (array.shape, array.dtype) == (entry.shape, entry.dtype):
                given[key] = _row_form(array)
            else:
                raise EnvError(
                    f"a transform writes {key!r} as {array.dtype} {list(array.shape)} on the way in, which the specs "
                    f"have as {entry.dtype} {list(entry.shape)}. Write it in that form, or pass use_buffers=False."
                )
        for key in before.keys() - after.keys():
            del given[key]

    def of_reset(self, root: Values, rows: Rows | None) -> TensorDict:
        """What a reset is given: all that goes on where ``rows`` does not mark, and the marks."""
        values = {key: value for key, value in root.items() if key not in self._left_out and as_tuple(key)[0] != "next"}
        td = as_tensordict(values, self.forms, self.batch_size, self.device)
        shape = (*self.batch_size, 1)
        marks = np.ones(shape, _FLAG) if rows is None else np.array(rows, _FLAG).reshape(shape)
        td.set("_reset", torch.from_numpy(marks))
        return td


Pairs = list[tuple[NestedKey, NestedKey]]


class ByEntry(NamedTuple):
    """A change of some entries by one function.

    Attributes:
        pairs: keys read and written, in order.
        function: is given tensors of their own.
    """

    pairs: Pairs
    function: Callable[[torch.Tensor], Any]

    def fits(self, before: Mapping[NestedKey, Entry], after: Mapping[NestedKey, Entry]) -> bool:
        """Whether what is read is there, and what is written is announced; no entry is read after it was written."""
        written: set[NestedKey] = set()
        for key, out_key in self.pairs:
            if key not in before or out_key not in after or key in written:
                return False
            written.add(out_key)
        return True


class _Forms(NamedTuple):
    """Entries at one place in a chain of transforms: what a reset returns and what a step returns, with flags."""

    reset: dict[NestedKey, Entry]
    step: dict[NestedKey, Entry]


class OnTensorDicts:
    """Steps and resets of a transform between array forms: what it is given becomes a TensorDict, and arrays again.

    The transform may write into tensors below ``"next"``: they have memory of their own.

    Args:
        transform: it.
        name: of its class, for reasons.
        env: the environment that it follows, with the transforms before it.
        before: flags of the root before the transform.
        output_spec: after the transform.
        roots: makes what it reads of the root.
        reads_root: whether the transform reads what a step began from.
        by_entry: where a step does nothing but change some entries by one function: keys read and written, in order,
            and the function. It is called on tensors then, and no TensorDict is made in a step.
        inverse: an array form of what it changes on the way in, see :attr:`ArrayTransform.inverse`; None: nothing.

    Attributes:
        entries: observations after it.
        rewards: rewards after it.
        drops: keys that it takes away.
        reads: as of ``inverse``; what the transform itself reads is not known.
        made: as of ``inverse``.

    Raises:
        NotNative: entries hold objects or vary in shape, or ``env`` is a part of a batch.
    """

    reads_env = True  # it may, by its parent

    def __init__(
        self,
        transform: Changes,
        name: str,
        env: ArrayEnv,
        before: Collection[NestedKey],
        output_spec: Composite,
        roots: RootTensorDicts,
        *,
        reads_root: bool,
        by_entry: ByEntry | None = None,
        inverse: ArrayTransform | None = None,
    ) -> None:
        if tuple(roots.batch_size) != env.batch:
            raise NotNative(f"{name} is given the rows of all environments together")
        if held := objects_of(env.entries):
            raise NotNative(f"entry {held[0]!r} holds objects, and {name} works on TensorDicts")
        self.transform, self.name = transform, name
        self._roots, self._reads_root = roots, reads_root
        self._batch_size, self._device = roots.batch_size, roots.device
        ndim = len(env.batch)
        columns = [key for key, entry in env.entries.items() if entry.column]
        self.entries = entries_of(output_spec["full_observation_spec"], ndim, columns)
        rewards = output_spec["full_reward_spec"]
        self.rewards = entries_of(rewards, ndim, rewards.leaves())
        self.drops = frozenset({*env.entries, *env.rewards} - {*self.entries, *self.rewards})
        self.inverse = None if inverse is None else inverse.inverse
        self.reads: list[NestedKey] = [] if inverse is None else inverse.reads
        self.made: frozenset[NestedKey] = frozenset() if inverse is None else inverse.made
        flag, after = Entry((*env.batch, 1), _FLAG, True), output_spec["full_done_spec"]
        flags: dict[NestedKey, Entry] = {name: flag for name in FLAGS if name in before}
        self._before = _Forms({**env.entries, **flags}, {**env.entries, **env.rewards, **flags})
        self._flags, self._hidden = flags, {*FLAGS} - flags.keys()
        self._off: Any = np.zeros(env.batch, _FLAG)[()]
        flags = {name: flag for name in FLAGS if name in after}
        self._after = _Forms({**self.entries, **flags}, {**self.entries, **self.rewards, **flags})
        fits = by_entry is not None and not self.drops and by_entry.fits(self._before.step, self._after.step)
        self._by_entry = by_entry if fits else None
        self._nested = any(not isinstance(key, str) for key in self._after.step)

    def step(self, root: Values, out: Values) -> None:
        """Change the outcome of a step in place.

        Args:
            root: the current TensorDict.
            out: the outcome.

        Raises:
            Deviation: the transform did something else than its specs announce.
        """
        before, expected = self._before.step, self._after.step
        if self._by_entry is not None:
            self._step_by_entry(out, *self._by_entry)
            return
        arrays = {key: _tensor_form(value, before.get(key)) for key, value in out.items() if key not in self._hidden}
        if len(arrays) != len(before):  # the policy has written below "next"
            expected = {**{key: _form(array) for key, array in arrays.items() if key not in before}, **expected}
        given = self._roots.of_step(root) if self._reads_root else _NOTHING
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        changed = self.transform.transform_step(given, _nested(tensors, self._batch_size, self._device))
        read = self._read(changed, expected)
        out.clear()
        out.update(dict.fromkeys(self._hidden, self._off))  # on arrays, each step has them
        out.update(read)

    def _step_by_entry(self, out: Values, pairs: Pairs, function: Callable[[torch.Tensor], Any]) -> None:
        before, after = self._before.step, self._after.step
        arrays = {key: _tensor_form(out[key], before[key]) for key, _ in pairs}
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        results = [function(tensors[key]) for key, _ in pairs]
        # The function may have written into what it was given.
        given = {key: tensor.numpy() for key, tensor in tensors.items()}
        values: Values = {key: _row_form(array) if before[key].column else array for key, array in given.items()}
        out.update(values)
        for (_, key), result in zip(pairs, results, strict=True):
            entry = after[key]
            if type(result) is not torch.Tensor or result.shape != entry.shape or result.requires_grad:
                break
            array = result.numpy()
            if array.dtype != entry.dtype:
                break
            values[key] = _row_form(array) if entry.column else array
        else:
            out.update(values)
            return
        td = as_tensordict(out, before, self._batch_size, self._device, left_out=self._hidden)
        for (_, key), result in zip(pairs, results, strict=True):
            td.set(key, result)
        raise Deviation(f"{self.name} writes {key!r} in another form than its specs announce", td)

    def reset(self, fresh: Values, rows: Rows | None, root: Values | None) -> None:
        """Change what a reset returned in place.

        Args:
            fresh: what it returned.
            rows: that were reset; None: all.
            root: what goes on where nothing was reset; None: nothing was given to the reset.

        Raises:
            Deviation: the transform did something else than its specs announce.
        """
        before = self._before.reset
        arrays = {key: _tensor_form(value, before.get(key)) for key, value in fresh.items()}
        arrays.update({key: np.zeros(entry.shape, _FLAG) for key, entry in self._flags.items()})
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        td = _nested(tensors, self._batch_size, self._device)
        given = td.empty() if root is None else self._roots.of_reset(root, rows)
        changed = self.transform.transform_reset(given, td)
        read = self._read(changed, self._after.reset)
        if any(np.count_nonzero(read.pop(flag)) for flag in FLAGS if flag in self._after.reset):
            raise Deviation(f"{self.name} ends trajectories at a reset", changed)
        fresh.clear()
        fresh.update(read)

    def _read(self, changed: TensorDictBase, expected: Mapping[NestedKey, Entry]) -> Values:
        """Values in row form.

        Args:
            changed: what the transform returned.
            expected: what it announces.

        Raises:
            Deviation: they are not the ones expected.
        """
        if type(changed) is not TensorDict or changed.batch_size != self._batch_size:
            raise Deviation(f"{self.name} returns no TensorDict of the environment's batch size", changed)
        nests = (value for value in changed.values(True) if isinstance(value, TensorDictBase)) if self._nested else ()
        if any(nest.batch_size != self._batch_size for nest in nests):
            raise Deviation(f"{self.name} returns nested TensorDicts of another batch size", changed)
        read: Values = {}
        for key, value in leaves(changed).items():
            entry = expected.get(key)
            if entry is None:
                raise Deviation(f"{self.name} writes {key!r}, which its specs do not announce", changed)
            array = self._array(value, key, changed)
            if array.shape != entry.shape or (array.dtype is not entry.dtype and array.dtype != entry.dtype):
                raise Deviation(
                    f"{self.name} writes {key!r} as {array.dtype} {list(array.shape)}, and its specs announce "
                    f"{entry.dtype} {list(entry.shape)}",
                    changed,
                )
            read[key] = _row_form(array) if entry.column else array
        if len(read) != len(expected):
            missing = next(key for key in expected if key not in read)
            raise Deviation(f"{self.name} returns no {missing!r}", changed)
        return read

    def _array(self, value: Any, key: NestedKey, changed: TensorDictBase) -> NDArray[Any]:
        """The array over the memory of a new value.

        Raises:
            Deviation: there is none.
        """
        try:
            if type(value) is torch.Tensor:
                array: NDArray[Any] = value.numpy()
                return array
        except (RuntimeError, TypeError):  # of another device or layout, or with a gradient
            pass
        raise Deviation(f"{self.name} writes {key!r}, which is no array", changed)


def _row_form(array: NDArray[Any]) -> Any:
    """A column without its last dimension; a number of a single environment."""
    return array[0] if array.ndim == 1 else array[..., 0]


def _tensor_form(value: Any, entry: Entry | None) -> NDArray[Any]:
    """A copy of a value, of the tensor's shape."""
    return np.array(value) if entry is None else np.array(value, entry.dtype).reshape(entry.shape)


def _form(array: NDArray[Any]) -> Entry:
    return Entry(array.shape, array.dtype, False)


def as_tensordict(
    values: Values,
    forms: Mapping[NestedKey, Entry],
    batch_size: torch.Size,
    device: torch.device | None,
    *,
    left_out: Collection[NestedKey] = (),
) -> TensorDict:
    """Values in row form as a TensorDict, over the memory of those that are arrays.

    Args:
        values: of an environment; and what a policy wrote, which has no form, as it is.
        forms: of the environment's.
        batch_size: of the TensorDict.
        device: of the TensorDict.
        left_out: keys of values that are left out.
    """
    tensors: dict[NestedKey, torch.Tensor] = {}
    for key, value in values.items():
        if key in left_out:
            continue
        tensors[key] = _as_tensor(value, forms.get(key))
    return _nested(tensors, batch_size, device)


def _as_tensor(value: Any, entry: Entry | None) -> torch.Tensor:
    """A value in row form as a tensor, over the memory of an array that is no column."""
    if entry is not None and entry.column:
        return torch.from_numpy(np.array(value, entry.dtype).reshape(entry.shape))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return as_tensor(value)


def _nested(
    tensors: Mapping[NestedKey, torch.Tensor], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    nested: dict[str, Any] = {}
    is_flat = True
    for key, tensor in tensors.items():
        if type(key) is str:
            nested[key] = tensor
        else:
            place(nested, key, tensor)
            is_flat = False
    return unchecked_td(nested, batch_size, device=device, nested=not is_flat)


class StepsOnArrays:
    """Makes arrays of a TensorDict for the array form of an environment, and a TensorDict of what its step returns.

    Args:
        env: the environment. A copy of it has a copy of this.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        self._arrays: ArrayEnv | None = None
        self._may_be_native = True
        self._forms: dict[NestedKey, Entry] = {}
        self._is_nested = False

    def __reduce__(self) -> tuple[Any, ...]:
        return StepsOnArrays, (self._env,)

    def __call__(self, tensordict: TensorDictBase) -> TensorDict | None:
        """The outcome of a step, complete; None: it cannot be taken so, and nothing was stepped."""
        if not self._may_be_native or type(tensordict) is not TensorDict:
            return None
        arrays = self._form()
        if arrays is None or (arrays.reads_presets and tensordict.get("next", None) is not None):
            return None
        root: Values = {}
        for key in arrays.reads:
            value = tensordict.get(key, None)
            if type(value) is not torch.Tensor or value.dtype is torch.bfloat16 or value.device.type != "cpu":
                return None
            entry, array = arrays.entries.get(key), value.detach().numpy()
            root[key] = array[..., 0] if entry is not None and entry.column else array
        nested: dict[str, Any] = {}
        out, device = arrays.step(root, {}), self._env.device
        for key, (shape, dtype, _) in self._forms.items():
            place(nested, key, torch.from_numpy(np.asarray(out[key], dtype).reshape(shape)))
        for name, size in arrays.nests.items():
            nested[name] = unchecked_td(nested[name], torch.Size([*arrays.batch, *size]), device=device)
        return unchecked_td(nested, self._env.batch_size, device=device, nested=self._is_nested)

    def _form(self) -> ArrayEnv | None:
        """The array form as it is now."""
        try:
            if self._arrays is not None:
                self._arrays.check()
                return self._arrays
        except NotNative:
            self._arrays = None
        try:
            self._arrays = form = array_form(self._env)
        except NotNative:  # and the same at each step
            self._may_be_native = False
            return None
        flag = Entry((*form.batch, 1), np.dtype(np.bool_), True)
        self._forms = {**form.carried, **form.rewards, **dict.fromkeys(form.root_flags, flag)}
        self._is_nested = any(isinstance(key, tuple) for key in self._forms)
        return form
