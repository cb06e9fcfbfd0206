"""Nested keys of TensorDicts: strings, or tuples of strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase, is_leaf_nontensor

NestedKey = str | tuple[str, ...]

__all__ = [
    "NestedKey",
    "as_keys",
    "as_tuple",
    "checked_key",
    "is_private",
    "key_str",
    "leaf_keys",
    "leaves",
    "place",
    "unravel",
    "without",
]


def as_tuple(key: NestedKey) -> tuple[str, ...]:
    """The path of a key.

    >>> as_tuple("a"), as_tuple(("a", "b"))
    (('a',), ('a', 'b'))
    """
    return (key,) if isinstance(key, str) else tuple(key)


def unravel(key: NestedKey) -> NestedKey:
    """A key in canonical form: a string at the root, a tuple below it.

    >>> unravel(("a",)), unravel(("a", "b"))
    ('a', ('a', 'b'))
    """
    if isinstance(key, str):
        return key
    return key[0] if len(key) == 1 else tuple(key)


def checked_key(name: str, key: Any) -> NestedKey:
    """A key that a user has given as the argument ``name``, in canonical form.

    Raises:
        TypeError: it is no key.

    >>> checked_key("end_key", ("next", "done"))
    ('next', 'done')
    """
    parts = [key] if isinstance(key, str) else key
    if isinstance(parts, tuple | list) and parts and all(isinstance(part, str) for part in parts):
        return unravel(tuple(parts))
    raise TypeError(f"{name}: expected a string or a tuple of strings, got {type(key).__name__}: {key!r}.")


def as_keys(keys: NestedKey | Sequence[NestedKey] | None) -> list[NestedKey]:
    """A list of keys from one key, a sequence of keys, or None.

    A tuple of strings is one nested key; a list is several keys.

    >>> as_keys("a"), as_keys(("a", "b")), as_keys(["a", ("b", "c")]), as_keys(None)
    (['a'], [('a', 'b')], ['a', ('b', 'c')], [])
    """
    if keys is None:
        return []
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, tuple) and keys and all(isinstance(part, str) for part in keys):
        return [unravel(keys)]
    return [unravel(key) for key in keys]


def place(nested: dict[str, Any], key: NestedKey, value: Any) -> None:
    """Put a value into nested dictionaries, such as ``TensorDict`` takes.

    >>> nested = {}
    >>> place(nested, ("a", "b"), 1)
    >>> nested
    {'a': {'b': 1}}
    """
    *path, name = (key,) if isinstance(key, str) else key
    for part in path:
        nested = nested.setdefault(part, {})
    nested[name] = value


def is_private(key: NestedKey) -> bool:
    """Whether a level of the key begins with an underscore (such keys never leave a collector).

    >>> is_private("_reset"), is_private(("agent", "_reset")), is_private("action")
    (True, True, False)
    """
    return any(part.startswith("_") for part in as_tuple(key))


def key_str(keys: NestedKey | Iterable[NestedKey]) -> str:
    """Keys for a message, sorted.

    >>> key_str(["b", ("next", "a")])
    "'b', ('next', 'a')"
    """
    listed = [keys] if isinstance(keys, str) else list(keys)
    return ", ".join(sorted((repr(unravel(key)) for key in listed), key=lambda text: text.strip("(")))


def leaf_keys(td: TensorDictBase) -> list[NestedKey]:
    """Keys of all leaves, objects that are no tensors included.

    >>> from tensordict import TensorDict
    >>> leaf_keys(TensorDict({"a": {"b": 0}}).set_non_tensor("word", "yes"))
    [('a', 'b'), 'word']
    """
    return [unravel(key) for key in td.keys(True, True, is_leaf=is_leaf_nontensor)]


def leaves(td: TensorDictBase, lazy: list[LazyStackedTensorDict] | None = None) -> dict[NestedKey, Any]:
    """All leaves by key, objects that are no tensors included; in one walk, for hot paths.

    Args:
        td: of a lazy stack, those that all of its elements have.
        lazy: lazy stacks that were met are added.

    >>> from tensordict import TensorDict
    >>> leaves(TensorDict({"a": {"b": 0}, "c": 1}))
    {('a', 'b'): tensor(0), 'c': tensor(1)}
    >>> list(leaves(TensorDict({"word": NonTensorStack("yes", "no")}, [2])))
    ['word']
    """
    found: dict[NestedKey, Any] = {}
    _walk(td, (), found, lazy)
    return found


def _walk(
    td: TensorDictBase, above: tuple[str, ...], found: dict[NestedKey, Any], lazy: list[LazyStackedTensorDict] | None
) -> None:
    if lazy is not None and isinstance(td, LazyStackedTensorDict):
        lazy.append(td)
    for name, value in td.items():
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorStack):
            _walk(value, (*above, name), found, lazy)
        else:
            found[(*above, name) if above else name] = value


def without(td: TensorDictBase, *keys: NestedKey) -> TensorDictBase:
    """``td`` less some entries; tensors are shared, nests are not, so that ``set`` leaves ``td`` alone.

    >>> from tensordict import TensorDict
    >>> td = TensorDict({"a": {"b": 0}, "c": 1})
    >>> leaf_keys(without(td, "c").set(("a", "d"), 2)), leaf_keys(td)
    ([('a', 'b'), ('a', 'd')], [('a', 'b'), 'c'])
    """
    if not keys:
        return td.copy()
    out = td.exclude(*keys)
    if isinstance(out, LazyStackedTensorDict):  # whose entries may have no common shape to be read with
        return out.copy()
    for name, value in list(out.items()):
        if not isinstance(value, torch.Tensor):
            out.set(name, value.copy())
    return out
