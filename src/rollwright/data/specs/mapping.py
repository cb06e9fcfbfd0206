"""SpecMapping: the dictionary side of a Composite, look-up and selection by nested keys."""

from __future__ import annotations

import abc
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any, Self

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright.data.specs.spec import TensorSpec

MISSING: Any = object()

_foreign: list[tuple[Callable[[Any], bool], Callable[[Any], TensorSpec]]] = []


def converts(recognises: Callable[[Any], bool], convert: Callable[[Any], TensorSpec]) -> None:
    """Let Composites take the specs of another library, converted."""
    _foreign.append((recognises, convert))


def converted(spec: Any) -> Any:
    """A spec of another library as one of this; anything else as it is."""
    return next((convert(spec) for recognises, convert in _foreign if recognises(spec)), spec)


class SpecMapping(TensorSpec):
    """A spec that holds others under nested keys.

    Attributes:
        entries: those of the first level, by name; None where only the name is known. It is for reading; ``set`` and
            its like check what they put in.
    """

    entries: dict[str, TensorSpec | None]
    _is_locked = False

    @property
    def is_locked(self) -> bool:
        """Whether entries may be neither set nor removed; specs made from this one are not locked."""
        return self._is_locked

    @property
    def locked(self) -> bool:
        """Same as :attr:`is_locked`."""
        return self.is_locked

    def lock_(self, recurse: bool | None = None) -> Self:
        """Let entries be neither set nor removed.

        Args:
            recurse: False: those of nested Composites may be, ``spec["a", "b"] = ...`` too; default: they may not.

        Example:
            >>> from rollwright.data import Composite, Unbounded
            >>> spec = Composite(a=Unbounded()).lock_()
            >>> spec.unlock_().set("b", Unbounded()).is_locked
            False
        """
        return self._set_lock(True, recurse is not False)

    def unlock_(self, recurse: bool | None = None) -> Self:
        """The opposite of :meth:`lock_`."""
        return self._set_lock(False, recurse is not False)

    def _set_lock(self, locked: bool, recurse: bool) -> Self:
        self._is_locked = locked
        for spec in self.entries.values() if recurse else ():
            if isinstance(spec, SpecMapping):
                spec.lock_() if locked else spec.unlock_()
        return self

    def _check_unlocked(self) -> None:
        if self.is_locked:
            raise RuntimeError(f"Cannot modify a locked {type(self).__name__}. Call unlock_() first, or clone().")

    @abc.abstractmethod
    def empty(self) -> Self:
        """A mapping of the same shape and device without entries."""

    def _flat(
        self,
        include_nested: bool,
        leaves_only: bool,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> dict[NestedKey, TensorSpec | None]:
        found: dict[NestedKey, TensorSpec | None] = {}
        for name, spec in () if step_mdp_static_only else self.entries.items():
            leaf = not isinstance(spec, SpecMapping) if is_leaf is None else is_leaf(type(spec))
            if leaf or not leaves_only:
                found[name] = spec
            if isinstance(spec, SpecMapping) and include_nested:
                below = spec.items(include_nested, leaves_only, is_leaf=is_leaf)
                found.update({(name, *as_tuple(key)): child for key, child in below})
        return found

    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> KeysView[NestedKey]:
        """The keys, in order of insertion.

        Args:
            include_nested: also the keys of nested Composites, as tuples.
            leaves_only: leave out the Composites themselves.
            is_leaf: says of a spec's class whether ``leaves_only`` keeps it; None: all but Composites.
            step_mdp_static_only: only entries that a step never changes, of which specs of this library have none;
                TorchRL's specs pass it to those that they hold.
        """
        return self._flat(include_nested, leaves_only, is_leaf, step_mdp_static_only).keys()

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> ValuesView[TensorSpec | None]:
        """The specs, None where an entry has none; for the arguments see :meth:`keys`."""
        return self._flat(include_nested, leaves_only, is_leaf, step_mdp_static_only).values()

    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        *,
        is_leaf: Callable[[type], bool] | None = None,
        step_mdp_static_only: bool = False,
    ) -> ItemsView[NestedKey, TensorSpec | None]:
        """Pairs of key and spec, for the arguments see :meth:`keys`."""
        return self._flat(include_nested, leaves_only, is_leaf, step_mdp_static_only).items()

    def leaves(self) -> dict[NestedKey, TensorSpec]:
        """The specs that are no Composites, by (nested) key; entries of which only the key is known are left out.

        Example:
            >>> from rollwright.data import Composite, Unbounded
            >>> list(Composite(value=None, info={"reward": Unbounded()}).leaves())
            [('info', 'reward')]
        """
        return {key: spec for key, spec in self._flat(True, True).items() if spec is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.entries))

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return is_key(key) and self.get(key, MISSING) is not MISSING  # type: ignore[arg-type]

    def is_empty(self, recurse: bool = False) -> bool:
        """Whether there is no entry; with ``recurse``, none but empty Composites."""
        return not (self._flat(True, True) if recurse else self.entries)

    def __getitem__(self, idx: Any) -> Any:
        """The entry of a (nested) key (None where only the key is known), or the Composite of an indexed sample.

        Raises:
            KeyError: there is no such entry.
            IndexError: the index does not fit the batch.
        """
        if not is_key(idx):
            return super().__getitem__(idx)
        spec = self.get(idx, MISSING)
        if spec is MISSING:
            raise self._unknown(idx)
        return spec

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """The entry of a (nested) key, or ``default``."""
        name, *rest = as_tuple(key)
        spec = self.entries.get(name, MISSING)
        if spec is MISSING or not rest:
            return default if spec is MISSING else spec
        return spec.get(tuple(rest), default) if isinstance(spec, SpecMapping) else default

    def _unknown(self, key: NestedKey) -> KeyError:
        known = key_str(self.keys(True))
        return KeyError(f"{unravel(key)!r}: expected one of {known or 'no keys (the spec is empty)'}.")

    def pop(self, key: NestedKey, default: Any = MISSING) -> Any:
        """Remove an entry, in place, and return it; ``default`` where there is none.

        Raises:
            KeyError: there is none, and no default.
        """
        spec = self.get(key, default)
        if spec is MISSING:
            raise self._unknown(key)
        if key in self:
            del self[key]
        return spec

    def __delitem__(self, key: NestedKey) -> None:
        name, *rest = as_tuple(key)
        if not rest or name not in self:
            self._check_unlocked()
        if key not in self:
            raise self._unknown(key)
        if rest:
            del self.entries[name][tuple(rest)]  # type: ignore[union-attr]
        else:
            del self.entries[name]

    def select(self, *keys: NestedKey, strict: bool = True) -> Self:
        """A Composite of the given entries only.

        Raises:
            KeyError: ``strict``, and there is no such entry.
        """
        for key in keys:
            if strict and key not in self:
                raise self._unknown(key)
        wanted = _by_first(keys)
        out = self.empty()
        for name, spec in self.entries.items():
            below = wanted.get(name)
            if below is None:
                continue
            if () in below:
                out.entries[name] = spec
            elif isinstance(spec, SpecMapping):
                out.entries[name] = spec.select(*below, strict=strict)
        return out

    def exclude(self, *keys: NestedKey) -> Self:
        """A Composite without the given entries; unknown ones are ignored."""
        unwanted = _by_first(keys)
        out = self.empty()
        for name, spec in self.entries.items():
            below = unwanted.get(name, [])
            if () not in below:
                out.entries[name] = spec.exclude(*below) if below and isinstance(spec, SpecMapping) else spec
        return out


def is_key(key: object) -> bool:
    """Whether an index is a (nested) key."""
    return isinstance(key, str) or (isinstance(key, tuple) and bool(key) and all(isinstance(part, str) for part in key))


def _by_first(keys: tuple[NestedKey, ...]) -> dict[str, list[tuple[str, ...]]]:
    """For each first part of the keys, what follows it."""
    grouped: dict[str, list[tuple[str, ...]]] = {}
    for key in keys:
        first, *rest = as_tuple(key)
        grouped.setdefault(first, []).append(tuple(rest))
    return grouped
