"""Environments on NumPy arrays: the native form of those that need no TensorDict to take a step.

An environment has this form beside its plain one (TensorDict in, TensorDict out), and both give the same bits. Both
stay, since neither can carry the other without loss. The plain form takes what arrays do not hold: flags in several
places, entries that differ between rows or vary in shape, objects, devices, batch sizes that follow the data, and
environments that users write. The array form is what makes a step as cheap as gymnasium's own: it has no TensorDict to
build. What both do stands once: the conversion of gymnasium's values (:meth:`GymWrapper.step_values`), the steps of
transforms (:meth:`Transform.on_arrays`), failures and replacements (:class:`RecreatedEnv`). A batch of environments
stacks TensorDicts in the one form and writes rows in the other.

Data are dictionaries from keys to arrays, in *row form*: an entry whose spec ends in a dimension of one that says
nothing (rewards, flags, counts) is a *column*, ``[*batch]``; for a single environment that is a plain number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.specs import Composite, NonTensor, TensorSpec
from rollwright.data.specs.conversion import numpy_dtype
from rollwright.errors import EnvError, NotNative, RollwrightError, text_of

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase


Rows = NDArray[np.bool_]
Values = dict[NestedKey, Any]
RowsStep = Callable[[Values], Values | Sequence[Callable[[], Values]] | None]
NameRow = Callable[[int, RollwrightError], RollwrightError]

FLAGS = ("done", "terminated", "truncated")

#: Entry of the root, bool ``[*batch]``, by which a transform lets only some of the environments of a SerialEnv or a
#: ParallelEnv be stepped; the others keep the outcome of the step before.
STEPPED = "_step"


class Entry(NamedTuple):
    """Shape and dtype of the values of an entry.

    Attributes:
        shape: of the tensor, with the batch in front.
        dtype: of its elements.
        column: whether values lack the last dimension, which is one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    column: bool

    def replace(self, **changes: Any) -> Entry:
        """The same with other attributes."""
        return self._replace(**changes)


class ArrayTransform(NamedTuple):
    """A transform on arrays, see :meth:`~rollwright.envs.Transform.on_arrays`.

    ``out`` and ``fresh`` are dictionaries in which it sets keys. The arrays in them are not its own: it sets a new
    array, and never writes into one that is there.

    Attributes:
        entries: those that it adds, and those that it changes, by the key that it sets.
        reads: what it reads from the root.
        step: called as ``step(root, out)``, where ``out`` is the content of ``"next"``: observations, rewards, flags.
        reset: called as ``reset(fresh)`` with what a reset returned: observations of all rows. Sets first values of
            what it adds, and changes what :attr:`step` changes.
        rewards: those that it adds or whose dtype it changes, as :attr:`entries`.
        drops: keys of observations and rewards that it takes away, from ``out`` and ``fresh``.
        restart: called in place of :attr:`reset`, as ``restart(fresh, rows)``, by transforms that keep something for
            each row: ``rows``, bool ``[*batch]``, marks those that are reset; None: all.
        inverse: called as ``inverse(given)`` with a copy of the root, before the environment is stepped, by
            transforms that change what it is given. ``reads`` holds what it reads.
        made: keys that :attr:`inverse` sets, and that the root therefore need not have.
        reads_env: whether :attr:`step` reads the environment itself, or steps it: what ended is not to be reset before.
    """

    entries: dict[NestedKey, Entry]
    reads: list[NestedKey]
    step: Callable[[Values, Values], None]
    reset: Callable[[Values], None]
    rewards: Mapping[NestedKey, Entry] = MappingProxyType({})
    drops: frozenset[NestedKey] = frozenset()
    restart: Callable[[Values, Rows | None], None] | None = None
    inverse: Callable[[Values], None] | None = None
    made: frozenset[NestedKey] = frozenset()
    reads_env: bool = False

    def replace(self, **changes: Any) -> ArrayTransform:
        """The same with other attributes."""
        return self._replace(**changes)


#: Functions that make the array form of a transform, by its class; see ``register_array_form``.
ARRAY_FORMS: dict[type, Callable[[Any, ArrayEnv], ArrayTransform]] = {}


class UnfitOutcome(NotNative):
    """A step or a reset was taken, and what came of it has other entries than the array form; the message says why.

    Whoever steps the environment goes on from it on TensorDicts: nothing is to be stepped or reset again.

    Attributes:
        outcome: what :meth:`EnvBase.step_outcome` or :meth:`EnvBase.reset_outcome` would have returned.
    """

    def __init__(self, reason: str, outcome: TensorDictBase) -> None:
        super().__init__(reason)
        self.outcome = outcome


class ArrayEnv(ABC):
    """An environment, or a batch of them, on arrays.

    Attributes:
        batch: shape of the batch, ``()`` for one environment.
        entries: what a reset returns and a step returns below ``"next"``, but for rewards and flags.
        rewards: what a step returns beside them and the flags ``done``, ``terminated`` and ``truncated``.
        reads: entries of the root that :meth:`step` reads.
        flags: those below the root, such as ``done`` of agents, which a reset returns, too. Those of the root decide.
        root_flags: those of the root that the environment has.
        done_follows: whether ``done`` is ``terminated | truncated`` in every step.
        may_be_unfit: whether steps and resets may raise :class:`UnfitOutcome`. Such a form is to be given all of the
            root, trajectory ids included, and to be told its forms (:meth:`see_roots`): it makes TensorDicts of it.
        reads_presets: whether what a policy wrote below ``"next"`` may change what comes of a step.
        nests: names of nested TensorDicts with a longer batch size than the root, and what it has behind :attr:`batch`.
        resets_ahead: whoever sets it promises to reset, right after each step and without arguments, at least those
            that ended. Environments elsewhere may then be reset before that is asked for.
        on_tensordicts: names of transforms that are called on TensorDicts.
        held_back: why another library steps the environment on TensorDicts; empty: none does.
    """

    resets_ahead: bool = False
    on_tensordicts: Sequence[str] = ()
    held_back: str = ""
    batch: tuple[int, ...]
    entries: dict[NestedKey, Entry]
    rewards: dict[NestedKey, Entry]
    reads: list[NestedKey]
    flags: Mapping[NestedKey, Entry] = MappingProxyType({})
    root_flags: tuple[str, ...] = FLAGS
    done_follows: bool = True
    may_be_unfit: bool = False
    reads_presets: bool = True
    nests: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    @property
    def carried(self) -> dict[NestedKey, Entry]:
        """What a reset returns, and the root of the next step holds: :attr:`entries` and :attr:`flags`."""
        return {**self.entries, **self.flags}

    @abstractmethod
    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch.

        Raises:
            NotNative: it has changed since (readers of ``info``, transforms, specs).
        """

    @abstractmethod
    def step(self, root: Values, preset: Values) -> Values:
        """Act.

        Args:
            root: holds what :attr:`reads` names.
            preset: what the policy wrote below ``"next"``.

        Returns:
            The content of ``"next"``, true last observations included, in arrays that are never written again.
        """

    @abstractmethod
    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """Begin new trajectories in the environments that ``rows``, bool ``[*batch]``, marks; None: in all.

        Returns:
            :attr:`carried`; what they hold in rows that are not marked means nothing.
        """

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """The same where what goes on may be read: ``root``, from which the next step would be taken."""
        return self.reset(rows, **kwargs)

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:  # noqa: B027 - most forms make no TensorDicts
        """Note the forms of all that roots hold, but for what a policy writes; see :attr:`may_be_unfit`."""

    def stepper(self) -> Callable[[Values], Values]:
        """A function that steps once more from a root, for a transform in :meth:`Transform.on_arrays`.

        Returns:
            It is called with the root of the step that the transform is part of, and returns the content of
            ``"next"`` after another step from there, as the transforms before this one leave it.

        Raises:
            NotNative: the environment cannot be stepped so.
        """
        raise NotNative("its steps cannot be repeated")

    def in_turn(self, parts: Sequence[ArrayEnv], name_error: NameRow) -> RowsStep | None:
        """A function that steps environments like this one in turn, each as a row, faster than one by one.

        Args:
            parts: the environments, this one first; their entries are equal.
            name_error: called with a row and the error that occurred there; returns the error to raise.

        Returns:
            It is called with a root, ``[len(parts), ...]``, and returns the content of ``"next"``; or None where
            nothing was stepped, and :meth:`step` of each environment is to be called; or, where all were stepped and
            what came does not fit together, functions that return or raise what these calls would. It reads no
            preset. None: there is no such function.
        """
        return None

    # A step in two halves, where the environments work in between -----------------------------------

    def groups(self, number: int) -> list[ArrayEnv]:
        """The batch in ``number`` parts of consecutive rows, each an array form of its own with all of its methods.

        While one part is between :meth:`send` and :meth:`receive`, the others may be stepped and reset.

        Raises:
            NotNative: the environments do not work by themselves, or are too few.
        """
        raise NotNative("its environments are stepped in this process")

    def send(self, root: Values, preset: Values) -> None:
        """Begin a step; arguments as of :meth:`step`, and read before it returns."""
        raise NotNative("its environments are stepped in this process")

    def receive(self) -> Values:
        """Wait for the step that :meth:`send` has begun; returns what :meth:`step` does."""
        raise NotNative("its environments are stepped in this process")


def array_form(env: EnvBase, *, objects: bool = False, unfit: bool = False) -> ArrayEnv:
    """The array form of an environment, which shares its state.

    Args:
        env: the environment.
        objects: whether entries may hold objects (text, graphs); their values are ``NonTensorData``.
        unfit: whether steps and resets may raise :class:`UnfitOutcome`.

    Raises:
        NotNative: it has none.
    """
    form = env._array_form()
    _check_specs(env, form)
    if form.may_be_unfit and not unfit:
        names = form.on_tensordicts
        raise NotNative(works_on_tensordicts(names) if names else "it may return what its specs do not announce")
    if not objects and (held := objects_of(form.entries)):
        raise NotNative(f"entry {held[0]!r} holds objects")
    return form


def _check_specs(env: EnvBase, form: ArrayEnv) -> None:
    """Test that what a form announces is what the environment's specs do; a user's transform may differ.

    Raises:
        NotNative: it is not.
    """
    for announced, specs in ((form.entries, env.full_observation_spec), (form.rewards, env.full_reward_spec)):
        for key, entry in announced.items():
            leaf = specs.get(key, None)
            if not isinstance(leaf, TensorSpec) or isinstance(leaf, NonTensor) or leaf.dtype is None:
                continue
            shape, dtype = tuple(leaf.shape), np.dtype(numpy_dtype(leaf.dtype))
            if (entry.shape, entry.dtype) != (shape, dtype):
                raise NotNative(
                    f"its array form has {key!r} as {entry.dtype} {list(entry.shape)}, its spec as {dtype} "
                    f"{list(shape)}"
                )


def works_on_tensordicts(names: Sequence[str]) -> str:
    """Why transforms of these names hold a run back, and what would mend it."""
    does = "works" if len(names) == 1 else "work"
    return f"{', '.join(names)} {does} on TensorDicts. Define on_arrays in it, or call register_array_form"


def objects_of(entries: Mapping[NestedKey, Entry]) -> list[NestedKey]:
    """Keys of entries that hold objects."""
    return [key for key, entry in entries.items() if entry.dtype == np.object_]


def constant(entry: Entry, value: int) -> Any:
    """An array for an entry, of one value; a NumPy number for a column of a single environment."""
    return np.full(entry.shape[:-1] if entry.column else entry.shape, value, entry.dtype)[()]


def check_open(env: EnvBase, call: str) -> None:
    """Test that an environment was not closed, with the message of the plain path."""
    if env.is_closed:
        raise EnvError(f"{env}: {call} after close(). {env.remedy_when_closed}.")


def raise_named(env: EnvBase, call: str, error: Exception) -> NoReturn:
    """Raise what an environment raised, with the message of the plain path; errors of this library as they are."""
    if isinstance(error, RollwrightError):
        raise error
    raise EnvError(f"{env} raised in {call}: {type(error).__name__}: {text_of(error)}") from error


def entries_of(
    spec: Composite, batch_ndim: int, columns: Iterable[NestedKey] = (), *, objects: bool = False
) -> dict[NestedKey, Entry]:
    """The entries of a Composite.

    Args:
        spec: the Composite.
        batch_ndim: the number of dimensions of the batch.
        columns: entries of which those that end in a dimension of one are columns.
        objects: whether entries may hold objects, one of a step.

    Raises:
        NotNative: one of them holds objects, or varies in shape.
    """
    named = set(columns)
    found = {}
    for key, leaf in spec.leaves().items():
        if objects and isinstance(leaf, NonTensor) and not leaf.shape:
            found[unravel(key)] = Entry((), np.dtype(np.object_), False)
            continue
        if isinstance(leaf, NonTensor) or leaf.dtype is None:
            raise NotNative(f"entry {key!r} holds objects")
        if -1 in leaf.shape:
            raise NotNative(f"entry {key!r} varies in shape")
        if leaf.dtype == torch.bfloat16:
            raise NotNative(f"entry {key!r} is of dtype {leaf.dtype}")
        column = unravel(key) in named and len(leaf.shape) == batch_ndim + 1 and leaf.shape[-1] == 1
        try:
            dtype = np.dtype(numpy_dtype(leaf.dtype))
        except TypeError as error:
            raise NotNative(f"entry {key!r} is of dtype {leaf.dtype}") from error
        found[unravel(key)] = Entry(tuple(leaf.shape), dtype, column)
    return found


STEPPING = (
    "step_outcome",
    "reset_outcome",
    "_step_mdp",
    "trim_frame",
    "any_done",
    "maybe_reset",
    "reset",
    "step",
    "step_and_maybe_reset",
)


def refuse_overrides(env: EnvBase, known: type[EnvBase], *, but: Collection[str] = ()) -> None:
    """Test that a subclass steps and resets as ``known``, whose array form is to be taken, ``but`` for some methods.

    Raises:
        NotNative: it does not.
    """
    for name in (*STEPPING, "_step", "_reset"):
        if name not in but and (getattr(type(env), name) is not getattr(known, name) or name in vars(env)):
            raise NotNative(f"{type(env).__name__} overrides {name}")
    if env._forward_hooks or env._forward_pre_hooks:
        raise NotNative(f"{type(env).__name__} has hooks")


def check_flags(env: EnvBase, below: Iterable[NestedKey] = (), *, lacks_truncated: bool = False) -> None:
    """Test that the flags are those of gymnasium: ``done``, ``terminated`` and ``truncated`` at the root.

    Args:
        env: the environment.
        below: the flags that its array form has below the root.
        lacks_truncated: whether ``truncated`` may be missing.

    Raises:
        NotNative: they are not.
    """
    keys = set(env.done_keys)
    if keys != {*FLAGS, *below} and not (lacks_truncated and keys == {*FLAGS[:2], *below}):
        raise NotNative(f"its flags are {sorted(keys, key=as_tuple)}")
    if env.run_type_checks:
        raise NotNative("run_type_checks=True")
    if env.device is not None and env.device.type != "cpu":
        raise NotNative(f"its device is {env.device}")
