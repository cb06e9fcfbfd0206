"""Recognises functions that do no more than call some classes of ``torch.distributions`` on their arguments."""

from __future__ import annotations

import dis
from collections.abc import Collection
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import distributions as D

__all__ = ["makes_constants"]

_MODULES = (torch, D)
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
        return any(found is module for module in _MODULES)
    return any(found is getattr(D, name) for name in classes)
