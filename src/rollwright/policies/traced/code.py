"""Inspects what the code of a module can do, before the calls that it makes are recorded in its place."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Collection, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributions as D

from rollwright.errors import NotNative
from rollwright.policies.watch import ModuleSnapshot, is_special

_TRUSTED = ("torch", "tensordict", "math", "operator", "_operator", "numpy")
CONSTANTS: tuple[type, ...] = (type(None), int, float, complex, str, bytes, Enum, EllipsisType)
CONSTANTS += (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)
_COMPILED = (BuiltinFunctionType, np.ufunc, type(str.join), type(object.__init__))  # types of functions written in C
_CHANGES = {"STORE_ATTR": "sets", "STORE_GLOBAL": "sets", "DELETE_ATTR": "deletes", "DELETE_GLOBAL": "deletes"}
_CHANGES |= {"DELETE_SUBSCR": "deletes", "IMPORT_NAME": "imports", "LOAD_BUILD_CLASS": "defines"}
_HARMLESS = {"abs", "all", "any", "divmod", "getattr", "hasattr", "isinstance", "issubclass", "len", "max", "min"}
_HARMLESS |= {"next", "pow", "round", "sorted", "sum"}  # of the builtins, beside the classes


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
        self._names = {"forward"}
        self._spaces: list[list[Any]] = []  # dictionaries in which every attribute of the code is looked up

    def value(self, value: Any, name: str) -> None:
        """Test what the code reads."""
        if isinstance(value, (*CONSTANTS, Tensor)) or id(value) in self._seen:
            return  # a tensor that is no parameter is found out when it is used
        match value:
            case list() | tuple() | set() | frozenset() | dict():
                for each in value.values() if isinstance(value, dict) else value:
                    self.value(each, name)
            case nn.Module():
                for part in value.modules():
                    self._module(part)
            case FunctionType():
                self._function(value)
            case MethodType():
                self.value((value.__self__, value.__func__), name)
            case partial():
                self.value((value.func, value.args, value.keywords), name)
            case property() | staticmethod() | classmethod():
                self.value(value.fget if isinstance(value, property) else value.__func__, name)
            case ModuleType() if not _trusted(value.__name__):
                self._seen.add(id(value))
                self._space([vars(value)])
            case _ if not _is_harmless(value):
                raise NotNative(f"its code uses {name!r}, a {type(value).__name__}")

    def _module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        self.modules.append(module)
        self._watch.add(module)
        own = [vars(kind) for kind in type(module).__mro__ if kind is not object and not _trusted(kind.__module__)]
        if (special := is_special(module)) is not None:
            raise NotNative(special)
        if any(name in fields for fields in own for name in ("__call__", "__getattr__", "__getattribute__")):
            raise NotNative(f"{type(module).__name__} has a __call__ or __getattr__ of its own")
        if own:
            self._space([vars(module), *own])

    def _space(self, space: list[Any]) -> None:
        self._spaces.append(space)
        self._look_up(space, self._names)

    def _look_up(self, space: list[Any], names: set[str]) -> None:
        for name in sorted(names):
            for fields in space:
                if name in fields:
                    self._read(fields, name)

    def _read(self, fields: Any, name: str) -> None:
        self._watch.read(partial(fields.get, name))
        self.value(fields[name], name)

    def _function(self, function: FunctionType) -> None:
        self._seen.add(id(function))
        code, found, names = function.__code__, function.__globals__, set()
        pairs = zip(code.co_freevars, function.__closure__ or (), strict=True)
        cells = [cell for name, cell in pairs if name != "__class__"]
        if _trusted(found.get("__name__")):  # a decorator's, which may call a function of the user's
            self.value([cell.cell_contents for cell in cells if isinstance(cell.cell_contents, FunctionType)], "")
            return
        for cell in cells:
            self._watch.read(partial(getattr, cell, "cell_contents"))
            self.value(cell.cell_contents, "a closure")
        self.value([function.__defaults__, function.__kwdefaults__], "a default")
        for line in _lines(code):
            name, kind = line.argval, line.opname
            if kind in _CHANGES or (kind == "STORE_DEREF" and name in code.co_freevars):
                raise NotNative(f"its code {_CHANGES.get(kind, 'sets')} {name!r}")
            if kind == "LOAD_GLOBAL" and name in found:
                self._read(found, name)
            elif kind == "LOAD_GLOBAL" and not _is_builtin(name):
                raise NotNative(f"its code uses {name!r}")
            elif kind in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                names.add(name)
        if "random" in names:  # of NumPy, most likely
            raise NotNative("its code uses 'random'")
        new = names - self._names
        self._names |= new
        for space in tuple(self._spaces):
            self._look_up(space, new)


def _lines(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _lines(const)


def _trusted(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in _TRUSTED


def _is_builtin(name: str) -> bool:
    return name in _HARMLESS or isinstance(getattr(builtins, name, None), type)


def _is_harmless(value: Any) -> bool:
    """Whether a callable, a class or a module is known to change nothing."""
    if isinstance(value, type):
        return _trusted(value.__module__) or issubclass(value, BaseException | nn.Module | Enum | tuple | int | float)
    owner = getattr(value, "__objclass__", value)
    return isinstance(value, ModuleType) or (isinstance(value, _COMPILED) and _trusted(_home(owner)))


def _home(value: Any) -> Any:
    return "numpy" if isinstance(value, np.ufunc) else getattr(value, "__module__", None)


# Functions that make distributions ------------------------------------------------------------------

_DISTRIBUTIONS = (torch, D)
_COMPUTES = ("BINARY", "COMPARE", "DELETE", "IMPORT", "STORE", "UNARY", "YIELD", "CONTAINS", "IS_OP", "RAISE")


def makes_constants(function: Any, classes: Collection[str]) -> bool:
    """Whether a function calls classes on its arguments and on constants, and nothing else: no branch, no arithmetic.

    Such a function makes the same kind of distribution at each call.

    Args:
        function: anything.
        classes: names of classes in ``torch.distributions`` that it may use.

    Example:
        >>> makes_constants(lambda loc, scale: D.Independent(D.Normal(loc, scale), 1), {"Independent", "Normal"})
        True
        >>> makes_constants(lambda loc, scale: D.Normal(loc, scale * 2), {"Normal"})
        False
    """
    if type(function) is not FunctionType or function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        return False
    for line in dis.get_instructions(function):
        if line.opcode in dis.hasjrel or line.opcode in dis.hasjabs or line.opname.startswith(_COMPUTES):
            return False
        if line.opname == "LOAD_GLOBAL":
            found = function.__globals__.get(str(line.argval))
            if not _known(found, classes):
                return False
        elif line.opname in ("LOAD_ATTR", "LOAD_METHOD") and line.argval not in {*classes, "distributions"}:
            return False
    return True


def _known(found: Any, classes: Collection[str]) -> bool:
    if isinstance(found, ModuleType):
        return any(found is module for module in _DISTRIBUTIONS)
    return any(found is getattr(D, name) for name in classes)
