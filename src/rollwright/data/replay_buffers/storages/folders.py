"""Folders that are replaced atomically: after a kill, the old or the new one is complete.

What a killed process leaves beside a folder is removed the next time that somebody writes or reads it. A process that
is at work holds a lock on the folder that it fills, which the system releases when it ends.

Only the files of a buffer are replaced or removed: others that lie in the folder, and folders inside, stay.
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

from rollwright.data.replay_buffers.storages.memory import LOCK_FILE, ROWS_FILE, STATE_FILE

LIST_FILE = "elements.pt"
_OURS = (STATE_FILE, f"{STATE_FILE}.new", ROWS_FILE, LOCK_FILE, LIST_FILE)

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


def holds_dump(folder: Path) -> bool:
    """Whether a folder is one that a buffer was written to."""
    return (folder / STATE_FILE).exists() and any((folder / name).exists() for name in (ROWS_FILE, LIST_FILE))


def remove_dump(folder: Path) -> None:
    """Remove the files of a buffer, and their folder, if it holds nothing else."""
    for name in _OURS:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds other files, or is not there
        folder.rmdir()


def _put_back(folder: Path) -> None:
    """Make a folder whole that was replaced, or was to be: nothing is left of what stepped aside for it."""
    aside = _aside(folder)
    if not aside.exists():
        return
    if not folder.exists():
        os.replace(aside, folder)
        return
    for found in aside.iterdir():
        if found.name not in _OURS:
            _move(found, folder / found.name)
    shutil.rmtree(aside, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Move a file or a folder, file by file where the folder is there; a file that is there stays, as the later one."""
    if not os.path.lexists(target):
        os.replace(source, target)
    elif source.is_dir() and not source.is_symlink():
        for found in source.iterdir():
            _move(found, target / found.name)


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
