"""Warnings that point at the user's line."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings

__all__ = ["warn_user"]

_PASSED = (str(contextlib.__file__), str(threading.__file__))


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line of the user's that has called this package, however deep in it this is called.

    A line of a subclass of the user's is one. In a thread of this package there is none: the thread's first is named.
    """
    packages = [sys.modules[name] for name in ("rollwright", "tensordict", "torch") if name in sys.modules]
    passed = (*_PASSED, *(os.path.join(os.path.dirname(str(each.__file__)), "") for each in packages))
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(passed) and frame.f_back is not None:
        frame = frame.f_back
    where = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<unknown>")
    warnings.warn_explicit(message, category, *where, frame.f_globals.setdefault("__warningregistry__", {}))
