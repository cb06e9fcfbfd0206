"""Sources of modules that a program has imported from its own folders, for machines that do not have them."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import pickle
import re
import site
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

_MOST_BYTES = 16 << 20
_IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([A-Za-z_]\w*)", re.M)
_read: dict[str, tuple[int, bytes]] = {}  # by file: when it was changed, and what is in it


class Source(NamedTuple):
    """The source of a module.

    Attributes:
        text: None: a folder without ``__init__.py``.
        file: where it lies on the machine of the program.
        is_package: whether other modules lie below it.
    """

    text: bytes | None
    file: str
    is_package: bool


def with_sources(pickled: bytes) -> bytes:
    """A pickle of the same, which brings along the sources of the program's own modules that it needs.

    These are modules that were imported from a file that is not installed: next to the script, in the working
    directory, or anywhere else on the path. A machine that has a module of that name uses its own.
    """
    sources = _needed(pickled)
    return pickle.dumps(_Sent(sources, pickled), 5) if sources else pickled


def loads_with_sources(sources: dict[str, Source], pickled: bytes) -> Any:
    """Unpickle; modules that are not found are made from these sources, from now on."""
    finder = next((each for each in sys.meta_path if isinstance(each, _SentModules)), None)
    if finder is None:
        finder = _SentModules()
        sys.meta_path.append(finder)
    finder.sources.update(sources)
    return pickle.loads(pickled)


class _Sent(NamedTuple):
    sources: dict[str, Source]
    pickled: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return loads_with_sources, (dict(self.sources), self.pickled)


# Here -----------------------------------------------------------------------------------------------


def _needed(pickled: bytes) -> dict[str, Source]:
    """By name: modules whose package is named in a pickle, or imported by one that is."""
    packages: dict[str, dict[str, Source]] = {}
    for name, module in sys.modules.copy().items():  # in one step: other threads import
        source = _source_of(name, module)
        if source is not None:
            packages.setdefault(name.partition(".")[0], {})[name] = source
    found: dict[str, Source] = {}
    wanted = [package for package in packages if package.encode() in pickled]
    size = 0
    while wanted:
        package = wanted.pop()
        modules = packages.pop(package, {})
        size += sum(len(source.text or b"") for source in modules.values())
        if size > _MOST_BYTES:
            break
        found.update(modules)
        texts = [source.text for source in modules.values() if source.text]
        wanted += {name.decode() for text in texts for name in _IMPORT.findall(text)} & packages.keys()
    return {**_folders(found), **found}


def _folders(found: dict[str, Source]) -> dict[str, Source]:
    """Packages without a file, which modules lie below."""
    parents = {name.rpartition(".")[0] for name in found}
    for name in list(parents):
        while name := name.rpartition(".")[0]:
            parents.add(name)
    return {name: Source(None, "", True) for name in parents if name and name not in found}


def _source_of(name: str, module: Any) -> Source | None:
    if name == "__main__" or name.partition(".")[0] == "rollwright" or not issubclass(type(module), ModuleType):
        return None
    own = object.__getattribute__(module, "__dict__")
    file = own.get("__file__")
    if not isinstance(file, str) or not file.endswith(".py") or file.startswith(_installed()):
        return None
    text = _text(file)
    return None if text is None else Source(text, file, "__path__" in own)


@cache
def _installed() -> tuple[str, ...]:
    """Folders of the interpreter's own and of installed packages, which other machines install for themselves."""
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths]
    found += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.join(form, "") for place in found for form in (place, os.path.realpath(place))})


def _text(file: str) -> bytes | None:
    try:
        changed = os.stat(file).st_mtime_ns
        if file not in _read or _read[file][0] != changed:
            with open(file, "rb") as opened:
                _read[file] = changed, opened.read()
        return _read[file][1]
    except OSError:
        return None


# There ----------------------------------------------------------------------------------------------


class _SentModules(importlib.abc.MetaPathFinder):
    """Finds modules that nothing else has found."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = self.sources.get(fullname)
        if source is None:
            return None
        if source.text is None:
            return ModuleSpec(fullname, None, is_package=True)
        return importlib.util.spec_from_loader(
            fullname, _SentModule(source), origin=source.file, is_package=source.is_package
        )


class _SentModule(importlib.abc.InspectLoader):
    """Makes one module."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        """For tracebacks."""
        return importlib.util.decode_source(self._source.text or b"")

    def is_package(self, fullname: str) -> bool:
        """Whether other modules lie below it."""
        return self._source.is_package

    def exec_module(self, module: ModuleType) -> None:
        """Run its code, which says what file it is from."""
        module.__file__ = self._source.file
        exec(compile(self.get_source(module.__name__), self._source.file, "exec"), module.__dict__)
