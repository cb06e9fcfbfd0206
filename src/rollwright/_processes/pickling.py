"""Pickling with code by value, where another process could not import it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

_Packages = dict[str, tuple[ModuleSpec | None, tuple[str, ...]]]  # outermost ones, by name, and their folders

_lock = threading.RLock()  # a pickle may hold another
_is_found: dict[tuple[str, str], bool] = {}  # by a module's name and file
_last: tuple[list[Any], list[Any], dict[str, Any]] = ([], [], {})  # modules: all, those undecided, those not found
_registered: list[ModuleType] = []  # while something is pickled
_depth = threading.local()  # of the pickles in progress in a thread


def dumps(value: Any) -> bytes:
    """Pickle an object with the functions and classes of ``__main__``, and of modules that no search finds.

    The latter are those that were loaded from a path: by a test runner, a plug-in, a notebook. A search for the
    name of such a module finds nothing, or another file. Modules without a file go by name.

    >>> import pickle
    >>> pickle.loads(dumps(lambda x: x + 1))(2)
    3
    """
    with _lock:
        known = cloudpickle.list_registry_pickle_by_value()  # by the user, or by a pickle that holds this one
        _depth.now = getattr(_depth, "now", 0) + 1
        strangers = [ModuleType(name) for name in _strangers() if name in sys.modules and name not in known]
        try:
            for module in strangers:  # stand-ins with its name: a lazy one would be loaded by a look at it
                _registered.append(module)
                cloudpickle.register_pickle_by_value(module)
            pickled = dumps_by_name(value)
        finally:
            _depth.now -= 1
            _unregister(strangers)
    return pickled


def dumps_by_name(value: Any) -> bytes:
    """Pickle an object for a process that finds every module, such as a forked one."""
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles a TensorDictModule around a function with all else: what it shares with others stays shared."""

    def reducer_override(self, obj: Any) -> Any:
        kind: Any = type(obj)
        module: Any = getattr(sys.modules.get("tensordict.nn"), "TensorDictModule", None)  # loads no torch in an actor
        if module is not None and isinstance(obj, module) and kind.__getstate__ is module.__getstate__:
            return object.__new__, (kind,), vars(obj), None, None, _set_attributes
        return super().reducer_override(obj)


def _set_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    thing.__dict__.update(attributes)


def is_sending() -> bool:
    """Whether this thread pickles something for another process, with :func:`dumps`."""
    return getattr(_depth, "now", 0) > 0


def _unregister(modules: list[ModuleType]) -> None:
    for module in list(modules):
        with contextlib.suppress(ValueError):  # a fork meanwhile
            cloudpickle.unregister_pickle_by_value(module)
        with contextlib.suppress(ValueError):
            _registered.remove(module)


def _begin_anew() -> None:
    """In a forked process, where the thread that was pickling is not."""
    global _lock
    _lock = threading.RLock()
    _unregister(_registered)


os.register_at_fork(after_in_child=_begin_anew)


def _strangers() -> list[str]:
    """Names of the modules that another process would not find, or would mistake for others.

    Only new modules are looked at: in a forked process, a look at a module copies the memory that it lies in.
    """
    global _last
    seen, undecided, strangers = _last
    modules = list(sys.modules.copy().values())  # in one step: other threads import
    if modules != seen:
        decided = {id(module) for module in seen}.difference(map(id, undecided))
        packages: _Packages = {}
        undecided = []
        strangers = {name: module for name, module in strangers.items() if sys.modules.get(name) is module}
        for module in (module for module in modules if id(module) not in decided):
            file = _file_of(module)
            if file is None:
                undecided.append(module)
            elif not _is_importable(module, file, packages):
                strangers[_dict_of(module)["__name__"]] = module
        _last = modules, undecided, strangers
    return list(strangers)


def _file_of(module: Any) -> str | None:
    """Its file; None if nothing is looked up in it by its name, or it has no file, so far."""
    own = _dict_of(module)
    name, file = own.get("__name__"), own.get("__file__")
    if not isinstance(name, str) or not isinstance(file, str) or name == "__main__":
        return None
    return file if file and sys.modules.get(name) is module else None


def _is_importable(module: Any, file: str, packages: _Packages) -> bool:
    """Whether another process finds it by its name."""
    own = _dict_of(module)
    name = own["__name__"]
    if (name, file) not in _is_found:
        alias = getattr(own.get("__spec__"), "name", name)  # of collections.abc: that it was imported by
        names = [name, alias] if alias != name and sys.modules.get(alias) is module else [name]
        _is_found[name, file] = any(_finds(each, file, packages) for each in names)
    return _is_found[name, file]


def _dict_of(module: Any) -> dict[str, Any]:
    """Its attributes, without loading a lazy one."""
    own = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else None
    return own if isinstance(own, dict) else {}


def _finds(name: str, file: str, packages: _Packages) -> bool:
    """Whether that file is what another process imports under that name."""
    package, *rest = name.split(".")
    if package not in packages:
        spec = _search(package, None)
        packages[package] = spec, tuple(os.path.join(place, "") for place in _places(spec))
    spec, folders = packages[package]
    if rest and file.startswith(folders):
        return True  # most are, and need no search
    for part in rest:
        if spec is None:
            return False
        places, package = _places(spec), f"{package}.{part}"
        spec = _search(package, places)
    return spec is not None and _is_at(spec, file)


def _search(name: str, places: list[str] | None) -> ModuleSpec | None:
    """As an import would where the module is not loaded yet."""
    for finder in list(sys.meta_path):
        try:
            spec: ModuleSpec | None = finder.find_spec(name, places)
        except Exception:  # foreign code
            continue
        if spec is not None:
            return spec
    return None


def _places(spec: ModuleSpec | None) -> list[str]:
    """Where the modules of a package lie; it may have added to them when it was imported."""
    if spec is None or spec.submodule_search_locations is None:
        return []
    own = _dict_of(sys.modules.get(spec.name))
    added: Iterable[Any] = own.get("__path__") or () if _is_at(spec, own.get("__file__")) else ()
    return [place for place in (*spec.submodule_search_locations, *added) if isinstance(place, str)]


def _is_at(spec: ModuleSpec, file: str | None) -> bool:
    if not spec.has_location or spec.origin is None:
        return spec.loader is not None  # built in, frozen, or foreign
    if spec.origin == file:
        return True
    try:
        return file is not None and os.path.samefile(spec.origin, file)
    except OSError:
        return False
