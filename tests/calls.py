"""Calls of Python functions in a ``with`` block, counted by function."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from pathlib import Path

import rollwright

__all__ = ["Calls"]

OURS = str(Path(rollwright.__file__).parent)
PARTS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}


class Calls:
    """Counts the calls of a thread in a ``with`` block.

    What counts is that the body of a function begins: a generator counts once, however often it goes on. Comprehensions
    and generator expressions do not count: they are part of the function that has them, and from Python 3.12 on most
    are no functions. Garbage is not collected meanwhile, since that runs what others left behind.

    Attributes:
        functions: calls by file and function, of all packages.
        classes: of the objects whose methods of ours were called, by name.
    """

    def __init__(self):
        self.functions, self.classes = Counter(), set()

    @property
    def ours(self):
        """Calls of functions of the package."""
        return self.within(OURS)

    @property
    def files(self):
        """Files of the package whose functions were called."""
        return {file for file, _ in self.functions if file.startswith(OURS)}

    def within(self, folder):
        """Calls of functions below a folder."""
        return sum(count for (file, _), count in self.functions.items() if file.startswith(str(folder)))

    def _see(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or code.co_name in PARTS:
            return
        # What follows in the code is RESUME: 0 where a function begins, more where a generator goes on.
        if code.co_flags & inspect.CO_GENERATOR and code.co_code[frame.f_lasti + 1] & 3:
            return
        self.functions[code.co_filename, code.co_qualname] += 1
        if code.co_filename.startswith(OURS) and code.co_varnames[:1] == ("self",):
            kind = type(frame.f_locals["self"])
            self.classes.add(f"{kind.__module__}.{kind.__qualname__}")

    def __enter__(self):
        self._before, self._collects = sys.getprofile(), gc.isenabled()
        gc.disable()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error):
        sys.setprofile(self._before)
        if self._collects:
            gc.enable()
