"""Saves the state of one part of a replay buffer; folders that are replaced at once.

After a kill, the old or the new folder is complete. What a killed process leaves beside a folder is removed the next
time that somebody writes or reads it. A process that is at work holds a lock on the folder that it fills, which the
system releases when it ends. Only the files of a buffer are replaced or removed: others that lie in the folder, and
folders inside, stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollwright.data.loading import load_saved, save
from rollwright.data.replay_buffers.storages.memory import LOCK_FILE, ROWS_FILE, STATE_FILE
from rollwright.errors import DamagedFileError


class Part:
    """A storage, a sampler or a writer: a part of a buffer, whose state can be saved by itself."""

    _part: str  # what it is called, and its file

    def state_dict(self) -> dict[str, Any]:
        """What cannot be found again by looking at the other parts: numbers, strings and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""

    @property
    def hooks(self) -> SavingHooks:
        """What is called when elements are written to a folder, or read from one; a storage may have some."""
        return SavingHooks()

    def dumps(self, path: str | Path) -> None:
        """Write the state to a folder, as one file; the folder is made where it is not there.

        Raises:
            OSError: the disk is full, or fails; the part that was written is removed, and an older file stays.
        """
        folder = Path(path).expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self._part}.pt"
        fresh = file.with_name(f"{file.name}.new")
        save(self.hooks.saved(self.state_dict(), path), fresh)
        os.replace(fresh, file)

    def loads(self, path: str | Path, *, allow_pickle: bool = False) -> None:
        """Hold what :meth:`dumps` wrote.

        Args:
            path: the folder.
            allow_pickle: see :meth:`ReplayBuffer.loads`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds objects, and ``allow_pickle`` is not set; or it does not fit.
            DamagedFileError: it is cut short, or holds something else.
        """
        file = Path(path).expanduser().resolve() / f"{self._part}.pt"
        if not file.is_file():
            raise FileNotFoundError(f"path: there is no {file.name} in {str(file.parent)!r}. Name a folder of dumps().")
        state = load_saved(file, allow_pickle=allow_pickle)
        if not isinstance(state, dict):
            raise DamagedFileError(f"{file} holds a {type(state).__name__}, expected the state of a {self._part}.")
        self.load_state_dict(self.hooks.loaded(state, path))


class SavingHooks:
    """Functions that change the elements of a storage before they are written to a folder, and change them back.

    They stay in this process: copies of a storage have none.

    Attributes:
        save: called one after the other as ``hook(elements, path=folder)``.
        load: in the same way, with what was read.
    """

    def __init__(self) -> None:
        self.save: list[Callable[..., Any]] = []
        self.load: list[Callable[..., Any]] = []

    def add(self, hooks: list[Callable[..., Any]], hook: Callable[..., Any]) -> None:
        """Add a hook to those of one kind.

        Raises:
            TypeError: it cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"hook: expected a callable that takes elements and path=, got {type(hook).__name__}.")
        hooks.append(hook)

    def saved(self, state: Mapping[str, Any], path: Any) -> dict[str, Any]:
        """The state of a storage as it is written to a folder."""
        return _changed(self.save, state, path)

    def loaded(self, state: Mapping[str, Any], path: Any) -> dict[str, Any]:
        """What was read from a folder, as a state of the storage."""
        return _changed(self.load, state, path)

    def __reduce__(self) -> tuple[Any, ...]:
        return SavingHooks, ()


def _changed(hooks: list[Callable[..., Any]], state: Mapping[str, Any], path: Any) -> dict[str, Any]:
    state = dict(state)
    for hook in hooks if state.get("elements") is not None else ():
        state["elements"] = hook(state["elements"], path=Path(path))
    return state


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
