"""Objects as JSON: text, numbers, None, lists, tuples and dictionaries of these; and tensorclasses by import path."""

from __future__ import annotations

import importlib
import json
from typing import Any, TypeVar

import numpy as np
from tensordict import is_tensorclass

_TUPLE = "\0tuple"  # key of a dictionary that stands for a tuple, which JSON does not have
_DEEPEST = 100


class NotJSONError(TypeError):
    """An object that JSON cannot hold; the message is a phrase that names its type and place."""


def dump_object(value: Any) -> bytes:
    r"""An object as JSON.

    Numbers of NumPy become numbers of Python, and strings of a subclass (an enum) plain strings.

    Raises:
        NotJSONError: it holds something else.

    >>> dump_object({"role": "user", "ids": [1, 2.5, None], "pair": (True, "é")})
    b'{"role":"user","ids":[1,2.5,null],"pair":{"\\u0000tuple":[true,"\\u00e9"]}}'
    """
    return _encode(_plain(value, 0)).encode()


def load_object(text: bytes) -> Any:
    """The object of :func:`dump_object`.

    Raises:
        ValueError: it is no JSON.

    >>> load_object(dump_object({"pair": (1, ["a"])}))
    {'pair': (1, ['a'])}
    """
    try:
        return _decode(str(text, "utf-8"))
    except RecursionError as error:
        raise ValueError("objects in one another without end") from error


_encode = json.JSONEncoder(separators=(",", ":")).encode


def _tuple_of(found: dict[str, Any]) -> Any:
    return tuple(found[_TUPLE]) if len(found) == 1 and isinstance(found.get(_TUPLE), list) else found


_decode = json.JSONDecoder(object_hook=_tuple_of).decode


def _plain(value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return value
    if depth > _DEEPEST:
        raise NotJSONError(f"objects in one another more than {_DEEPEST} deep")
    if isinstance(value, dict):
        plain = {}
        for key, part in value.items():
            if not isinstance(key, str):
                raise NotJSONError(f"a dictionary with the key {key!r} of type {type(key).__name__}, no string")
            if key == _TUPLE:
                raise NotJSONError(f"a dictionary with the key {key!r}, which stands for a tuple")
            plain[str(key)] = _plain(part, depth + 1)
        return plain
    if kind is tuple:
        return {_TUPLE: [_plain(part, depth + 1) for part in value]}
    if isinstance(value, list):
        return [_plain(part, depth + 1) for part in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, np.generic) and not isinstance(value, np.complexfloating):
        return _plain(value.item(), depth + 1)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise NotJSONError(f"an object of type {kind.__module__}.{kind.__qualname__}")


C = TypeVar("C", bound=type)

# Classes of this library, imported when one is read for the first time. No other module is imported for a name.
_OWN = {
    "rollwright.data.llm.history.ChatHistory",
    "rollwright.data.llm.history.History",
}
_known: dict[str, type] = {}
_paths: dict[type, str] = {}  # of classes that were written


def register_tensorclass(cls: C) -> C:
    """Let storages and datasets restore entries of a tensorclass as instances of it; returns the class.

    Bytes in a file or in shared memory name a class by its import path, and reading them imports nothing. So a class is
    restored where this process knows it: it is registered (decorate it), it was written in this process before, or it
    is one of rollwright's. Elsewhere its entries are read as a TensorDict.

    Raises:
        TypeError: it is no tensorclass.

    Example:
        >>> import torch
        >>> from tensordict import TensorClass
        >>> @register_tensorclass
        ... class Image(TensorClass):
        ...     pixels: torch.Tensor
        ...     caption: str
    """
    if not isinstance(cls, type) or not is_tensorclass(cls):
        raise TypeError(f"cls: expected a tensorclass, got {cls!r}. Decorate the class with tensordict's first.")
    _known[path_of(cls)] = cls
    return cls


def path_of(cls: type) -> str:
    """The import path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def remember(cls: type) -> str:
    """Register a class of an object that is written here; returns its path."""
    path = _paths.get(cls)
    if path is None:
        path = _paths[cls] = path_of(cls)
    _known.setdefault(path, cls)
    return path


def class_at(path: str) -> type | None:
    """The tensorclass of a path; None where this process does not know it."""
    if path not in _known and path in _OWN:
        module, _, name = path.rpartition(".")
        found: Any = getattr(importlib.import_module(module), name, None)
        if isinstance(found, type) and is_tensorclass(found):
            _known[path] = found
    return _known.get(path)
