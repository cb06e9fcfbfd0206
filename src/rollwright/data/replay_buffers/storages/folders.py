"""Folders that are replaced atomically: after a kill, the old or the new one is complete.

What a killed process leaves beside a folder is removed the next time that somebody writes or reads it. A process that
is at work holds a lock on the folder that it fills, which the system releases when it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["recover", "replacing"]

_LONGEST_WAIT_S, _NAP_S = 10.0, 1e-3


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``folder`` when the ``with`` block ends; else it is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new, held = _new_beside(folder)
    try:
        yield new
        with _swapping(folder):
            _put_back(folder)
            if folder.exists():
                shutil.rmtree(_aside(folder), ignore_errors=True)
                os.replace(folder, _aside(folder))
            os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        os.close(held)
    recover(folder)


def recover(folder: Path) -> None:
    """Put back a folder whose process was killed while it was being replaced, and remove what others left beside it.

    For use before a folder is opened.
    """
    with _swapping(folder):
        _put_back(folder)
        for left in _beside(folder):
            held = _locked(left)
            if held is not None:  # nobody fills it any more
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)


def _put_back(folder: Path) -> None:
    if not folder.exists() and _aside(folder).exists():
        os.replace(_aside(folder), folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{_prefix(folder)}replaced")


def _prefix(folder: Path) -> str:
    return f".{folder.name}-rollwright-"


def _beside(folder: Path) -> list[Path]:
    """What processes have made beside a folder: new ones being filled, and the one that was replaced."""
    ours = re.compile(re.escape(_prefix(folder)) + "[a-z0-9_]{8}")  # as tempfile names them; "replaced" is one
    try:
        return [found for found in folder.parent.iterdir() if ours.fullmatch(found.name)]
    except OSError:  # it is not there, or cannot be listed
        return []


def _new_beside(folder: Path) -> tuple[Path, int]:
    """An empty folder that is locked, and the descriptor that holds the lock."""
    while True:
        with _swapping(folder):  # nobody removes it before it is locked
            new = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
            held = _locked(new)
        if held is not None:
            return new, held


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None where somebody else has it."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        return None
    return held


@contextlib.contextmanager
def _swapping(folder: Path) -> Iterator[None]:
    """Let one process at a time rename beside ``folder``; after a while, and where folders have no locks, all do."""
    try:
        parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    until = time.monotonic() + _LONGEST_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(_NAP_S)
                    continue
            except OSError:
                pass
            break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
        os.close(parent)
