"""Batches of environments: the base class of SerialEnv and ParallelEnv, parts of a batch, its array form."""

from __future__ import annotations

import operator
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self, TypedDict, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright._options import refuse_unknown
from rollwright._seeding import seed_torch
from rollwright.data.specs import Composite, StackedComposite
from rollwright.data.specs.discrete import choices
from rollwright.envs._results import complete_reset, complete_step
from rollwright.envs.arrays import FLAGS, ArrayEnv, Entry, UnfitOutcome, Values, check_flags
from rollwright.envs.base import EnvBase
from rollwright.envs.factories import (
    EACH,
    SPECS,
    common_batch_size,
    common_device,
    is_ragged,
    placed,
    renamed,
    stacked_specs,
)
from rollwright.envs.tensordicts_on_arrays import as_tensordict
from rollwright.errors import EnvError, NotNative, RollwrightError


class IgnoredOptions(TypedDict, total=False):
    """Accepted so that programs written with them run: data goes through shared memory, and is the caller's own."""

    share_individual_td: bool | None
    use_buffers: bool | None
    consolidate: bool
    pin_memory: bool
    shared_memory: bool
    memmap: bool
    policy_proof: Any
    allow_step_when_done: bool
    daemon: bool
    metadata_from_workers: bool
    shutdown_timeout: float | None


def check_ignored(given: Iterable[str], owner: str) -> None:
    """Test the names of what was given.

    Raises:
        TypeError: one is unknown.
    """
    refuse_unknown(given, list(IgnoredOptions.__annotations__), owner)


class BatchedEnv(EnvBase):
    """A batch of environments, ``[num_workers, *batch]``.

    After :meth:`close`, the first reset of all environments (or :meth:`set_seed`) makes new ones.

    Args:
        parts: the environments, or what is known of them: ``batch_size``, ``device``, ``allow_done_after_reset`` and
            the five ``full_*_spec``.
        device: where the batch's data is put; None: where the environments have theirs.

    Attributes:
        num_workers: number of environments.
        openings: how often environments were made: once, and with each reset after :meth:`close`.
    """

    returns_copies = True  # stacking copies
    made_its_parts = True
    remedy_when_closed = "Reset it first: that makes its environments again"

    def __init__(self, parts: Sequence[Any], device: torch.device | str | int | None) -> None:
        batch = common_batch_size([part.batch_size for part in parts])
        super().__init__(
            device=common_device([part.device for part in parts]) if device is None else device,
            batch_size=(len(parts), *batch),
            allow_done_after_reset=any(part.allow_done_after_reset for part in parts),
        )
        self.num_workers = len(parts)
        listed = {name: [getattr(part, f"full_{name}_spec") for part in parts] for name in SPECS}
        for name, spec in stacked_specs(listed, self.device).items():
            setattr(self, f"full_{name}_spec", spec)
        self.openings = 1  # how often environments were made
        self._moved_to: torch.device | None = None
        self._ragged = any(is_ragged(getattr(self, f"full_{name}_spec")) for name in SPECS)

    def _finalize(self) -> None:
        super()._finalize()
        self._follow_masks()

    def _follow_masks(self) -> None:
        """Let actions have the masks that their environments set."""
        spec = self.full_action_spec
        if isinstance(spec, StackedComposite):
            for row, own in enumerate(spec.specs):
                for key, leaf in choices(own).items():
                    leaf.follow_mask(_Masks(self, key, row))
        else:
            for key, leaf in choices(spec).items():
                leaf.follow_mask(_Masks(self, key))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._follow_masks()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all environments. A second call raises unless ``raise_if_closed=False``.

        Raises:
            EnvError: they are closed.
        """
        if self.is_closed and raise_if_closed:
            raise EnvError(f"{self} is already closed. Pass raise_if_closed=False to allow this.")
        super().close()

    # Closed, and opened again ---------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> Sequence[Any]:
        """Make environments in the place of those that were closed; returns what the constructor calls parts.

        Raises:
            EnvError: that cannot be.
        """

    @abstractmethod
    def known_parts(self) -> Sequence[Any]:
        """The parts that were there before."""

    def _reopen(self) -> None:
        """See :class:`EnvBase`.

        Raises:
            EnvError: other environments were made than before, or those that were closed once more.
        """
        before = list(self.known_parts())
        parts = self._open()
        self.is_closed = False
        self.openings += 1
        for i, (new, old) in enumerate(zip(parts, before, strict=True)):
            if new is old or _entries(new) != _entries(old):
                self.close()
                how = "the one that was closed" if new is old else f"one of other specs, {getattr(new, 'text', new)},"
                raise EnvError(
                    f"{type(self).__name__}[{i}]: a reset after close() makes new environments, and create_env_fn has "
                    f"returned {how}. Let it make one like it at each call, or make a new {type(self).__name__}."
                )
        if self._moved_to is not None:
            self.to(self._moved_to)

    def call_in_hosts(self, function: Callable[..., object]) -> None:
        """Call a function in each process that hosts environments, with each :class:`Hosted` there.

        Environments of this process are among the modules of the batch, and are left out.
        """

    def to(self, device: torch.device | str | int | None) -> Self:  # type: ignore[override]
        """Move the environments and the batch; returns the environment."""
        super().to(device)
        self._follow_masks()
        self._moved_to = self.device if device is not None else self._moved_to
        return self

    # Resets and seeds ---------------------------------------------------------------------------

    def seed_for_reset(self, kwargs: dict[str, Any]) -> None:
        """Take a seed out of the arguments of a reset, and seed each environment with its own, as ``set_seed``.

        Raises:
            EnvError: ``list_of_kwargs`` has another length than there are environments.
        """
        each = kwargs.get(EACH)
        if each is not None and len(each) != self.num_workers:
            raise EnvError(
                f"{EACH}: expected one dictionary for each of the {self.num_workers} environments, got {len(each)}. "
                "Pass an empty one where there is nothing to say."
            )
        seed = kwargs.pop("seed", None)
        if seed is not None:
            self._seed_envs(seed, False)

    def _is_marked(self, row: TensorDictBase | None) -> bool:
        """Whether a worker has anything to reset: without any mask, or with one that is not all False."""
        masks = [] if row is None else [row.get(key, None) for key in self.reset_keys]
        masks = [mask for mask in masks if mask is not None]
        return not masks or any(bool(mask.any()) for mask in masks)

    def _filled(self, fresh: Sequence[TensorDictBase | None], parts: Sequence[Any]) -> list[TensorDictBase]:
        """Something of the right form for workers that were not reset; it is not read."""
        if self._ragged:
            return [
                part.full_observation_spec.zero().update(part.full_done_spec.zero()) if row is None else row
                for part, row in zip(parts, fresh, strict=True)
            ]
        example = next(row for row in fresh if row is not None)
        return [example if row is None else row for row in fresh]

    def _stack(self, rows: Sequence[TensorDictBase]) -> TensorDictBase:
        rows = [placed(row, self.device) for row in rows]
        if self._ragged:
            return cast(TensorDictBase, LazyStackedTensorDict.lazy_stack(rows, 0))
        return cast(TensorDictBase, torch.stack(rows, 0))  # type: ignore[arg-type]

    def joined(self, call: str, rows: Sequence[TensorDictBase], *, whole: bool = False) -> TensorDictBase:
        """What ``step_outcome`` or ``reset_outcome`` returns, where ``rows`` are what the environments' have returned.

        Args:
            call: ``"step"`` or ``"reset"``.
            rows: of all environments; those that were not reset hold anything.
            whole: whether nothing was given to the reset.
        """
        with self._named_errors(call):
            outcome = self._stack(rows)
        if call == "step":
            return complete_step(self, outcome.empty(), outcome)
        return complete_reset(self, None if whole else outcome.empty(), outcome)

    def seed_each(
        self,
        rows: Iterable[int],
        seed: int | None,
        static_seed: bool,
        one: Callable[..., int | None],
    ) -> int | None:
        """Seed some environments by ``one(row, seed, static_seed)``; see :meth:`IndexedEnvs.seed_rows`."""
        last = None
        for row in rows:
            last = one(row, seed, static_seed)
            if seed is not None and last is not None and not static_seed:
                seed = last + 1
        return last

    def named_error(self, worker: int, error: RollwrightError) -> RollwrightError:
        """What the environment of a worker raised, with the worker's place in front."""
        return renamed(f"{type(self).__name__}[{worker}]", error)

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed all environments: the first of each worker follows the last of the worker before.

        Returns:
            The seed of the last environment.
        """
        last = super().set_seed(seed, static_seed)
        if seed is not None:
            seed_torch(seed)  # the environments have left theirs
        return last

    def start(self) -> None:
        """No effect: the environments are there from the beginning, and are recreated by a reset after close()."""


class _Masks:
    """The masks that the environments of a batch have set for an action, stacked; None: none has.

    Args:
        env: the batch.
        key: of the action.
        row: of the environment whose mask is meant; None: all.
    """

    def __init__(self, env: BatchedEnv, key: NestedKey, row: int | None = None) -> None:
        self._row = row
        self._env, self._key = weakref.ref(env), key  # who drops the batch ends its processes
        self._specs: list[Composite] = []
        self._leaves: list[Any] = []

    def __call__(self) -> Tensor | None:
        env = self._env()
        if env is None:
            return None
        parts = env.known_parts()
        specs = [part.full_spec("action") for part in (parts if self._row is None else [parts[self._row]])]
        if not (len(specs) == len(self._specs) and all(map(operator.is_, specs, self._specs))):
            self._specs, self._leaves = specs, [spec[self._key] for spec in specs]
        masks = [leaf.mask for leaf in self._leaves]
        found: Tensor | None = next((mask for mask in masks if mask is not None), None)
        if found is None:
            return None
        everything = torch.ones_like(found)
        device = found.device if env.device is None else env.device
        rows = [(everything if mask is None else mask).to(device) for mask in masks]
        return torch.stack(rows, 0) if self._row is None else rows[0]


def _entries(part: Any) -> dict[Any, Any]:
    """Shapes and dtypes of all that an environment reads and returns."""
    specs = [(name, getattr(part, f"full_{name}_spec")) for name in SPECS]
    return {(name, key): (leaf.shape, leaf.dtype) for name, spec in specs for key, leaf in spec.leaves().items()}


class IndexedEnvs(BatchedEnv):
    """A batch of environments of which some can be stepped, reset, seeded and looked into: a base class."""

    @abstractmethod
    def step_rows(self, tensordict: TensorDictBase, marks: Sequence[bool]) -> TensorDictBase:
        """Let some environments take a step.

        Args:
            tensordict: what all act on, ``[num_workers, *batch]``; what it holds for others is not read.
            marks: for each environment, whether it is one of them.

        Returns:
            What ``_step`` does; what it holds for others means nothing.
        """

    @abstractmethod
    def reset_rows(self, tensordict: TensorDictBase | None, marks: Sequence[bool], **kwargs: Any) -> TensorDictBase:
        """Reset some environments, of these again only what ``"_reset"`` marks; see :meth:`step_rows`."""

    @abstractmethod
    def seed_rows(self, rows: Sequence[int], seed: int | None, static_seed: bool) -> int | None:
        """Seed some environments, each with what follows the last seed of the one before; returns the last."""

    @abstractmethod
    def look_up(self, name: str, rows: Sequence[int]) -> Any:
        """The values of an attribute of some environments; of a method, a function that calls it in each of them."""

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        return self.seed_rows(range(self.num_workers), seed, static_seed)

    def __getitem__(self, index: Any) -> EnvsView:
        """Some of the environments, as a batch; see :class:`EnvsView`."""
        return EnvsView(self, _rows(index, self.num_workers))


class EnvsView(BatchedEnv):
    """Some environments of a batch: ``env[1:3]`` of a ``SerialEnv`` or ``ParallelEnv``.

    They are the same environments: who steps one of them in the view has stepped it in the batch. The batch size is
    ``[n, *batch]`` for ``n`` of them, and n is 1 for ``env[1]``. Closing the view leaves the environments open; closing
    the batch ends the view. State (``state_dict()``) is the batch's.

    Args:
        batch: whose environments they are.
        rows: their places.

    Raises:
        EnvError: the batch is closed.

    Example:
        >>> from rollwright.envs import GymEnv, SerialEnv
        >>> env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
        >>> env[1:].rollout(5).batch_size, env[0].batch_size
        (torch.Size([2, 5]), torch.Size([1]))
    """

    made_its_parts = False
    remedy_when_closed = "A view ends with its batch, or when it is closed. Index the batch again"

    _batch: IndexedEnvs
    _rows: list[int]
    _openings: int
    _ended = False

    def __init__(self, batch: IndexedEnvs, rows: Sequence[int]) -> None:
        if batch.is_closed:
            raise EnvError(f"{batch}: indexed after close(). {batch.remedy_when_closed}.")
        self.__dict__.update(_batch=batch, _rows=list(rows), _openings=batch.openings)  # no module of this one
        parts = batch.known_parts()
        super().__init__([parts[row] for row in rows], batch.device)
        everywhere = range(batch.num_workers)
        self._marks = [row in rows for row in everywhere]
        self._places = torch.tensor([rows.index(row) if row in rows else 0 for row in everywhere], device="cpu")
        self._index = torch.tensor(self._rows, device="cpu")

    def __getitem__(self, index: Any) -> EnvsView:
        """Some of these environments."""
        return EnvsView(self._batch, [self._rows[place] for place in _rows(index, self.num_workers)])

    # Stepping ---------------------------------------------------------------------------------

    def _whole(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Data of the whole batch: those of the view in its rows, and some of them in others."""
        return placed(tensordict[self._places], self._batch.device)

    def _mine(self, tensordict: TensorDictBase) -> TensorDictBase:
        return placed(tensordict[self._index], self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._batch.note_use()
        return self._mine(self._batch.step_rows(self._whole(tensordict), self._marks))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.seed_for_reset(kwargs)
        if EACH in kwargs:
            each = dict(zip(self._rows, kwargs[EACH], strict=True))
            kwargs[EACH] = [each.get(row, {}) for row in range(self._batch.num_workers)]
        whole = None if tensordict is None else self._whole(tensordict)
        self._batch.note_use()
        return self._mine(self._batch.reset_rows(whole, self._marks, **kwargs))

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        if self.is_closed:
            self._open()
        return self._batch.seed_rows(self._rows, seed, static_seed)

    def moment(self) -> object:
        """Differs once somebody has reset or stepped the environment, or one that it is made of."""
        return self.num_uses, self._batch.moment()

    # The end ----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or the batch with its environments."""
        return self._ended or self._batch.is_closed or self._batch.openings != self._openings

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        self.__dict__["_ended"] = value

    def known_parts(self) -> list[Any]:
        """The parts that were there before."""
        parts = self._batch.known_parts()
        return [parts[row] for row in self._rows]

    def _open(self) -> NoReturn:
        raise EnvError(f"{self} is closed. {self.remedy_when_closed}.")

    def _reopen(self) -> None:
        """A view stays closed."""

    # The object -------------------------------------------------------------------------------

    @property
    def recreations(self) -> list[int]:
        """How many environments were in each place before."""
        counts: Any = self._batch.recreations
        return [counts[row] for row in self._rows]

    def to(self, device: torch.device | str | int | None) -> EnvsView:  # type: ignore[override]
        """Move what the view returns; the environments stay where they are."""
        super().to(device)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_rows" not in self.__dict__ or name.startswith("_") or self.is_closed:
                raise
        return self._batch.look_up(name, self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batch}, {self._rows})"


def _rows(index: Any, num_rows: int) -> list[int]:
    """The rows that an index names.

    Raises:
        IndexError: there is no such row, or one is there twice, or there is none.
        TypeError: it is no index.
    """
    if isinstance(index, slice):
        rows = list(range(num_rows))[index]
    else:
        places = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
        if places.dtype.kind not in "iu" or places.ndim > 1:
            raise TypeError(
                "index: expected a number, a slice, or a list, array or tensor of numbers of environments, got "
                f"{index!r}. Of a mask, take mask.nonzero()."
            )
        rows = [int(place) for place in places.reshape(-1)]
        if any(not -num_rows <= row < num_rows for row in rows):
            raise IndexError(f"index: expected numbers from {-num_rows} to {num_rows - 1}, got {index!r}.")
        rows = [row % num_rows for row in rows]
    if not rows or len(set(rows)) < len(rows):
        raise IndexError(f"index: expected environments of {num_rows} that differ, at least one, got {index!r}.")
    return rows


class ArrayFacts(NamedTuple):
    """A description of an array form; see :class:`~rollwright.envs.arrays.ArrayEnv`."""

    entries: dict[NestedKey, Entry]
    rewards: dict[NestedKey, Entry]
    flags: dict[NestedKey, Entry]
    reads: list[NestedKey]
    nests: dict[str, tuple[int, ...]]
    root_flags: tuple[str, ...]
    done_follows: bool
    may_be_unfit: bool
    on_tensordicts: list[str]
    held_back: str

    @classmethod
    def of(cls, form: ArrayEnv) -> ArrayFacts:
        """That of one, in a form that can be sent to another process."""
        kept = {"flags": dict, "nests": dict, "on_tensordicts": list}
        return cls(*(kept.get(name, lambda value: value)(getattr(form, name)) for name in cls._fields))


class BatchArrays(ArrayEnv):
    """Environments on arrays as one, each of them a row; those of one batch have equal entries."""

    def _describe(self, env: BatchedEnv, facts: Sequence[ArrayFacts], number: int, *, below: bool) -> None:
        """Become the form of ``number`` environments.

        Args:
            env: the batch.
            facts: of each of its environments.
            number: of those that this is the form of.
            below: whether there may be flags below the root.

        Raises:
            NotNative: they differ, or their flags are others.
        """
        self._facts = first = facts[0]
        if any(each[:-2] != first[:-2] for each in facts):
            raise NotNative("its environments differ in their entries")
        check_flags(env, first.flags if below else (), lacks_truncated=len(first.root_flags) < len(FLAGS))
        self._number, self._inner = number, env.batch_size[1:]
        self.batch = (number, *self._inner)
        self.entries, self.rewards, self.flags = map(self._widened, (first.entries, first.rewards, first.flags))
        self.reads, self.nests, self.root_flags = first.reads, first.nests, first.root_flags
        self.done_follows, self.may_be_unfit = first.done_follows, first.may_be_unfit
        self.on_tensordicts, self.held_back = first.on_tensordicts, first.held_back
        self._outcome_forms = {**self.carried, **self.rewards, **_flags(self.root_flags, self.batch)}

    def _widened(self, entries: Mapping[NestedKey, Entry]) -> dict[NestedKey, Entry]:
        return {key: entry.replace(shape=(self._number, *entry.shape)) for key, entry in entries.items()}

    def _unfit(
        self,
        env: BatchedEnv,
        call: str,
        values: Values,
        places: Iterable[int],
        unfit: Mapping[int, UnfitOutcome],
        *,
        whole: bool = False,
    ) -> UnfitOutcome:
        """An outcome of which some rows do not fit arrays.

        Args:
            env: the batch.
            call: ``"step"`` or ``"reset"``.
            values: of the rows that fit, in a reset without flags; and what the policy has written, where others return
                that, too.
            places: that hold something; the others have a copy of the first of them.
            unfit: what the rows at some places are.
            whole: whether nothing was given to the reset.
        """
        shown = unfit[min(unfit)]
        if call == "reset":
            off: Any = np.zeros(self.batch, np.bool_)
            values = {**values, **dict.fromkeys(self.root_flags, off)}
        own = {*self._outcome_forms, *FLAGS}
        kept = [key for key in values if key in own or shown.outcome.get(key, None) is not None]
        rows: dict[int, TensorDictBase] = {i: found.outcome for i, found in unfit.items()}
        for i in set(places) - rows.keys():
            rows[i] = _as_row(self._facts, {key: np.array(values[key][i, ...]) for key in kept}, self._inner)
        some = rows[min(rows)]
        joined = env.joined(call, [rows[i] if i in rows else some.clone() for i in range(self._number)], whole=whole)
        return UnfitOutcome(str(shown), joined)


def check_presets(form: ArrayEnv, outcome: Values, preset: Values) -> None:
    """Test that what a policy wrote below ``"next"``, and the environment does not return itself, is as it was.

    Raises:
        UnfitOutcome: it is not, and has no place in shared rows.
    """
    for key, value in preset.items():
        if key in form.carried or key in form.rewards or key not in outcome:
            continue
        found = np.asarray(outcome[key])
        if (found.dtype, found.shape, found.tobytes()) != (value.dtype, value.shape, value.tobytes()):
            td = _as_row(form, outcome, torch.Size(form.batch))
            raise UnfitOutcome(f"its step changes {key!r}, which the policy has written", td)


def _as_row(form: ArrayFacts | ArrayEnv, outcome: Values, batch_size: torch.Size) -> TensorDict:
    """An outcome of one environment as a TensorDict."""
    forms = {**form.entries, **form.flags, **form.rewards, **_flags(form.root_flags, batch_size)}
    shown = {key: value for key, value in outcome.items() if key not in FLAGS or key in forms}
    return as_tensordict(shown, forms, batch_size, None)


def _flags(names: Sequence[str], batch: tuple[int, ...]) -> dict[NestedKey, Entry]:
    return {name: Entry((*batch, 1), np.dtype(np.bool_), True) for name in names}


def blank(entries: Mapping[NestedKey, Entry]) -> dict[NestedKey, Any]:
    """New arrays, their content left open."""
    return {key: np.empty(shape[:-1] if column else shape, dtype) for key, (shape, dtype, column) in entries.items()}
