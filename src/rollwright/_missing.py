"""The error for a name that a package does not have: it names the most similar one, and the package that has it."""

from __future__ import annotations

import difflib
import dis
import sys
from importlib import import_module

__all__ = ["missing_name"]

_PACKAGES = (
    "rollwright",
    "rollwright.collectors",
    "rollwright.data",
    "rollwright.envs",
    "rollwright.modules",
    "rollwright.weight_update",
    "rollwright.collectors.llm",
    "rollwright.collectors.distributed",
    "rollwright.envs.llm",
    "rollwright.modules.llm",
    "rollwright.testing",
)


def missing_name(package: str, name: str) -> AttributeError | ImportError:
    """What ``__getattr__`` of a package raises; to be called there.

    Args:
        package: its name.
        name: what was asked for.

    Returns:
        An ImportError in ``from package import name``, where Python would drop the text of an AttributeError.
    """
    frame = sys._getframe(2)
    if dis.opname[frame.f_code.co_code[frame.f_lasti]] != "IMPORT_FROM":
        return AttributeError(f"module {package!r} has no attribute {name!r}.{_similar(package, name)}")
    owner = next((other for other in _PACKAGES if name in import_module(other).__all__), None)
    hint = _similar(package, name) if owner is None else f" Write: from {owner} import {name}."
    return ImportError(f"cannot import name {name!r} from {package!r}.{hint}", name=name)


def _similar(package: str, name: str) -> str:
    near = difflib.get_close_matches(name, sys.modules[package].__all__, 1)
    return f" Did you mean {near[0]!r}?" if near else ""
