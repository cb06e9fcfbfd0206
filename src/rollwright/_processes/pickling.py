"""Pickles that bring along the code that another process could not import."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

__all__ = ["dumps"]

_lock = threading.RLock()  # a pickle may hold another
_found: dict[str, bool] = {}  # by name of the outermost package
_last: tuple[Any, list[ModuleType]] = (None, [])  # what tells that modules were imported, and those not found


def dumps(value: Any) -> bytes:
    """Pickle an object with the functions and classes of ``__main__``, and of modules that no search finds.

    The latter are those that were loaded from a path: by a test runner, a plug-in, a notebook.

    >>> import pickle
    >>> pickle.loads(dumps(lambda x: x + 1))(2)
    3
    """
    global _last
    with _lock:
        modules = list(sys.modules.values())
        if _last[0] != (stamp := (len(modules), id(modules[-1]))):
            _last = stamp, [module for module in modules if _is_stranger(module)]
        known = cloudpickle.list_registry_pickle_by_value()  # by the user, or by a pickle that holds this one
        strangers = [m for m in _last[1] if sys.modules.get(m.__name__) is m and m.__name__ not in known]
        for module in strangers:
            cloudpickle.register_pickle_by_value(module)
        try:
            pickled: bytes = cloudpickle.dumps(value, 5)
        finally:
            for module in strangers:
                cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _is_stranger(module: Any) -> bool:
    if not isinstance(module, ModuleType) or not getattr(module, "__file__", None):
        return False
    package = module.__name__.partition(".")[0]
    if package not in _found:
        _found[package] = package == "__main__" or any(_finds(finder, package) for finder in sys.meta_path)
    return not _found[package]


def _finds(finder: Any, package: str) -> bool:
    try:
        return finder.find_spec(package, None) is not None
    except (AttributeError, ImportError, ValueError):
        return False
