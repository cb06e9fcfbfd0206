"""Inspects what the code of a module can do, before the calls that it makes are recorded in its place."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollwright.errors import NotNative
from rollwright.policies.watch import ModuleSnapshot, is_special

_TRUSTED = ("torch", "tensordict", "math", "operator", "_operator", "numpy")
_CONSTANTS = (int, float, complex, str, bytes, Enum, EllipsisType, torch.dtype, torch.device, torch.Size, torch.layout)
_DESCRIPTORS = (np.ufunc, BuiltinFunctionType, type(str.join), type(object.__init__), type(torch.tanh))
_STORES = {
    "DELETE_ATTR": "deletes {!r}",
    "DELETE_GLOBAL": "deletes {!r}",
    "DELETE_SUBSCR": "deletes items",
    "IMPORT_NAME": "imports {!r}",
    "LOAD_BUILD_CLASS": "defines a class",
    "STORE_ATTR": "sets {!r}",
    "STORE_GLOBAL": "sets {!r}",
}
_HARMLESS = {
    "abs",
    "all",
    "any",
    "divmod",
    "getattr",
    "hasattr",
    "isinstance",
    "issubclass",
    "len",
    "max",
    "min",
    "next",
}
_HARMLESS |= {"pow", "round", "sorted", "sum"}  # of the builtins, beside the classes


def inspect(target: Any, watch: ModuleSnapshot) -> list[nn.Module]:
    """Test that a call changes nothing but what it returns, as far as its code shows; the modules that it may call.

    Args:
        target: a module, a function or a method.
        watch: is given the modules, and all else that the code reads.

    Raises:
        NotNative: it may change something, or uses what is not known; the message gives the reason.
    """
    inspection = _Inspection(watch)
    inspection.value(target, "forward")
    return inspection.modules


class _Inspection:
    """Goes through functions and what they name: globals, closures, and attributes of the modules at hand."""

    def __init__(self, watch: ModuleSnapshot) -> None:
        self.modules: list[nn.Module] = []
        self._watch = watch
        self._seen: set[int] = set()
        self._names: set[str] = set()
        self._spaces: list[Any] = []  # in which every name of the code is looked up

    def value(self, value: Any, name: str) -> None:
        """Test what the code reads."""
        if value is None or isinstance(value, (*_CONSTANTS, Tensor)):
            return  # a tensor that is no parameter is found out when it is used
        if isinstance(value, list | tuple | set | frozenset | dict):
            for each in value.values() if isinstance(value, dict) else value:
                self.value(each, name)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self.value(value.__self__, name)
            self.value(value.__func__, name)
        elif isinstance(value, partial):
            self.value([value.func, value.args, value.keywords], name)
        elif isinstance(value, property | staticmethod | classmethod):
            self.value(value.fget if isinstance(value, property) else value.__func__, name)
        elif isinstance(value, ModuleType) and not _trusted(value.__name__):
            self._space(value)
        elif not _is_harmless(value):
            raise NotNative(f"its code uses {name!r}, a {type(value).__name__}")

    def _module(self, module: nn.Module) -> None:
        for part in module.modules():
            if id(part) in self._seen:
                continue
            self._seen.add(id(part))
            if (special := is_special(part)) is not None:
                raise NotNative(special)
            self.modules.append(part)
            self._watch.add(part)
            self._names.add("forward")
            if own := list(_own_classes(part)):
                if any(name in vars(kind) for kind in own for name in ("__call__", "__getattr__", "__getattribute__")):
                    raise NotNative(f"{type(part).__name__} has a __call__ or __getattr__ of its own")
                self._space(part)

    def _space(self, space: Any) -> None:
        if id(space) not in self._seen or isinstance(space, nn.Module):
            self._seen.add(id(space))
            self._spaces.append(space)
            self._look_up(space, self._names)

    def _look_up(self, space: Any, names: set[str]) -> None:
        kinds = list(_own_classes(space)) if isinstance(space, nn.Module) else []
        for name in sorted(names):
            for fields in (vars(space), *map(vars, kinds)):
                if name in fields:
                    self._watch.read(partial(fields.get, name))
                    self.value(fields[name], name)

    def _function(self, function: FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if _trusted(function.__globals__.get("__name__", "")):
            for cell in cells.values():  # a decorator's function is the user's
                if isinstance(cell.cell_contents, FunctionType):
                    self._function(cell.cell_contents)
            return
        for line in _lines(function.__code__):
            if line.opname in _STORES:
                raise NotNative(f"its code {_STORES[line.opname].format(line.argval)}")
            if line.opname == "STORE_DEREF" and line.argval in cells:
                raise NotNative(f"its code sets {line.argval!r}")
            if line.opname == "LOAD_GLOBAL":
                self._global(function.__globals__, line.argval)
            elif line.argval == "random":
                raise NotNative("its code uses 'random'")  # of NumPy, most likely
        for name, cell in cells.items():
            if name != "__class__":
                self._watch.read(partial(getattr, cell, "cell_contents"))
                self.value(cell.cell_contents, name)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(default, "a default")
        new = set(_names(function.__code__)) - self._names
        self._names |= new
        for space in tuple(self._spaces):
            self._look_up(space, new)

    def _global(self, found: dict[str, Any], name: str) -> None:
        if name in found:
            self._watch.read(partial(found.get, name))
            self.value(found[name], name)
        elif name not in _HARMLESS and not isinstance(getattr(builtins, name, None), type):
            raise NotNative(f"its code uses {name!r}")


def _lines(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _lines(const)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _trusted(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in _TRUSTED


def _own_classes(module: nn.Module) -> Iterator[type]:
    """Classes of a module that torch and tensordict do not define."""
    return (kind for kind in type(module).__mro__ if kind is not object and not _trusted(kind.__module__))


def _is_harmless(value: Any) -> bool:
    """Whether a callable, a class or a module is known to change nothing."""
    if isinstance(value, ModuleType):
        return True
    if isinstance(value, type):
        return _trusted(value.__module__) or issubclass(value, BaseException | nn.Module | Enum | tuple | int | float)
    owner: Callable[..., Any] | Any = getattr(value, "__objclass__", value)
    return isinstance(value, _DESCRIPTORS) and _trusted(getattr(owner, "__module__", None))
