"""Tensorclasses that may be restored from bytes, by import path."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

from tensordict import is_tensorclass

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
