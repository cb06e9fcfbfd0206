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
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.specs import Composite, NonTensor
from rollwright.data.specs.gymspaces import numpy_dtype
from rollwright.errors import EnvError, NotNative

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase

__all__ = [
    "ArrayEnv",
    "ArrayTransform",
    "Entry",
    "Rows",
    "Values",
    "array_form",
    "check_flags",
    "check_open",
    "constant",
    "entries_of",
    "named_error",
    "refuse_overrides",
]

Rows = NDArray[np.bool_]
Values = dict[NestedKey, Any]

FLAGS = ("done", "terminated", "truncated")


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
    """

    entries: dict[NestedKey, Entry]
    reads: list[NestedKey]
    step: Callable[[Values, Values], None]
    reset: Callable[[Values], None]
    rewards: Mapping[NestedKey, Entry] = MappingProxyType({})
    drops: frozenset[NestedKey] = frozenset()


class ArrayEnv(ABC):
    """An environment, or a batch of them, on arrays.

    Attributes:
        batch: shape of the batch, ``()`` for one environment.
        entries: what a reset returns and a step returns below ``"next"``, but for rewards and flags.
        rewards: what a step returns beside them and the flags ``done``, ``terminated`` and ``truncated``.
        reads: entries of the root that :meth:`step` reads.
        resets_ahead: whoever sets it promises to reset, right after each step and without arguments, at least those
            that ended. Environments elsewhere may then be reset before that is asked for.
    """

    resets_ahead: bool = False
    batch: tuple[int, ...]
    entries: dict[NestedKey, Entry]
    rewards: dict[NestedKey, Entry]
    reads: list[NestedKey]

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
            :attr:`entries`; what they hold in rows that are not marked means nothing.
        """

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


def array_form(env: EnvBase) -> ArrayEnv:
    """The array form of an environment, which shares its state.

    Raises:
        NotNative: it has none.
    """
    return env._array_form()


def constant(entry: Entry, value: int) -> Any:
    """An array for an entry, of one value; a NumPy number for a column of a single environment."""
    return np.full(entry.shape[:-1] if entry.column else entry.shape, value, entry.dtype)[()]


def check_open(env: EnvBase, call: str) -> None:
    """Test that an environment was not closed, with the message of the plain path."""
    if env.is_closed:
        raise EnvError(f"{env}: {call} after close(). {env.remedy_when_closed}.")


def named_error(env: EnvBase, call: str, error: Exception) -> EnvError:
    """What an environment raised, with the message of the plain path."""
    return EnvError(f"{env} raised in {call}: {type(error).__name__}: {error}")


def entries_of(spec: Composite, batch_ndim: int, columns: Iterable[NestedKey] = ()) -> dict[NestedKey, Entry]:
    """The entries of a Composite.

    Raises:
        NotNative: one of them holds objects, or varies in shape.
    """
    named = set(columns)
    found = {}
    for key in spec.keys(True, True):
        leaf = spec[key]
        if isinstance(leaf, NonTensor) or leaf.dtype is None:
            raise NotNative(f"entry {key!r} holds objects")
        if -1 in leaf.shape:
            raise NotNative(f"entry {key!r} varies in shape")
        if leaf.dtype == torch.bfloat16:
            raise NotNative(f"entry {key!r} is of dtype {leaf.dtype}")
        column = unravel(key) in named and len(leaf.shape) == batch_ndim + 1 and leaf.shape[-1] == 1
        found[unravel(key)] = Entry(tuple(leaf.shape), np.dtype(numpy_dtype(leaf.dtype)), column)
    return found


STEPPING = (
    "step_outcome",
    "reset_outcome",
    "_step_mdp",
    "any_done",
    "maybe_reset",
    "reset",
    "step",
    "step_and_maybe_reset",
)


def refuse_overrides(env: EnvBase, known: type[EnvBase]) -> None:
    """Test that a subclass steps and resets as ``known``, whose array form is to be taken.

    Raises:
        NotNative: it does not.
    """
    for name in (*STEPPING, "_step", "_reset"):
        if getattr(type(env), name) is not getattr(known, name) or name in vars(env):
            raise NotNative(f"{type(env).__name__} overrides {name}")
    if env._forward_hooks or env._forward_pre_hooks:
        raise NotNative(f"{type(env).__name__} has hooks")


def check_flags(env: EnvBase) -> None:
    """Test that the flags are those of gymnasium: ``done``, ``terminated`` and ``truncated`` at the root.

    Raises:
        NotNative: they are not.
    """
    keys = set(env.done_keys)
    if keys != set(FLAGS):
        raise NotNative(f"its flags are {sorted(keys, key=as_tuple)}")
    if env.run_type_checks:
        raise NotNative("run_type_checks=True")
    if env.device is not None and env.device.type != "cpu":
        raise NotNative(f"its device is {env.device}")
