"""What the fork server imports before all else, so that forked processes need not.

While tensordict is imported, it marks a few functions for ``torch.compile``, and that imports the whole compiler, which
takes longer than all the rest. Here they are marked when the compiler is imported, if it ever is.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

torch.set_num_threads(1)  # before anything computes: threads do not survive a fork

_COMPILER = "torch._dynamo"
_MARKS = ("allow_in_graph", "assume_constant_result")  # of torch.compiler; both return the function itself


class _MarkLater(importlib.abc.MetaPathFinder):
    """Stands in for the marks inside a ``with`` block, and makes them when the compiler is imported."""

    def __enter__(self) -> None:
        self._marks = {name: getattr(torch.compiler, name) for name in _MARKS}
        self._marked: list[tuple[Callable[[Any], Any], Any]] = []
        for name, mark in self._marks.items():
            setattr(torch.compiler, name, self._noting(mark))
        sys.meta_path.insert(0, self)

    def _noting(self, mark: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def note(function: Any) -> Any:
            self._marked.append((mark, function))
            return function

        return note

    def __exit__(self, *error: object) -> None:
        for name, mark in self._marks.items():
            setattr(torch.compiler, name, mark)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Not find anything; but see to it that the compiler makes the marks once it is there."""
        if fullname != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_mark(module: ModuleType) -> None:
            load(module)
            for mark, function in self._marked:
                mark(function)

        spec.loader.exec_module = load_and_mark  # type: ignore[method-assign]
        return spec


if _COMPILER not in sys.modules:
    with _MarkLater():
        import tensordict  # noqa: F401

import gymnasium  # noqa: E402, F401
import numpy.ma  # noqa: E402, F401  # by functions of numpy when they are called
import torch.utils._device  # noqa: E402
import torch.utils.serialization  # noqa: E402
