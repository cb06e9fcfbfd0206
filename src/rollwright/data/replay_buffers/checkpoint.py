"""What it takes to save a replay buffer, and to go on with it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollwright.data.replay_buffers._memory import ROWS_FILE
from rollwright.data.replay_buffers._rows import RowStorage
from rollwright.data.replay_buffers.tensors import LazyMemmapStorage

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.buffer import ReplayBuffer

__all__ = ["dump", "load", "restore", "state_of"]

STATE_FILE, LIST_FILE = "state.pt", "elements.pt"


def state_of(buffer: ReplayBuffer, *, with_elements: bool) -> dict[str, Any]:
    """The state of a buffer's parts."""
    state = {
        "sampler": buffer.sampler.state_dict(),
        "writer": buffer.writer.state_dict(),
        "generator": None if buffer.generator is None else buffer.generator.get_state(),
    }
    return {"storage": buffer.storage.state_dict(), **state} if with_elements else state


def restore(buffer: ReplayBuffer, state: Mapping[str, Any]) -> None:
    """Give a buffer's parts a saved state.

    Raises:
        KeyError: it is the state of something else.
    """
    missing = [name for name in ("sampler", "writer") if name not in state]
    if missing:
        raise KeyError(f"state_dict: expected that of a replay buffer, got {sorted(state)}: {missing} missing.")
    if state.get("storage") is not None:
        buffer.storage.load_state_dict(state["storage"])
    buffer.sampler.load_state_dict(state["sampler"])
    buffer.writer.load_state_dict(state["writer"])
    if state.get("generator") is not None and buffer.generator is not None:
        buffer.generator.set_state(state["generator"])


def dump(buffer: ReplayBuffer, path: Any) -> None:
    """Write a buffer to a folder."""
    folder = Path(path).expanduser().resolve()
    storage = buffer.storage
    if isinstance(storage, LazyMemmapStorage) and storage.scratch_dir == folder:
        torch.save(state_of(buffer, with_elements=False), folder / (STATE_FILE + ".new"))
        os.replace(folder / (STATE_FILE + ".new"), folder / STATE_FILE)  # elements are there already
        storage.flush()
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        torch.save(state_of(buffer, with_elements=False), new / STATE_FILE)
        state = storage.state_dict()
        if isinstance(storage, RowStorage) and state["elements"] is not None:
            rows = LazyMemmapStorage(storage.max_size, scratch_dir=new, ndim=storage.ndim)
            rows.load_state_dict(state)
            rows.flush()
        else:
            torch.save(state, new / LIST_FILE)
        _replace(folder, new)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Put ``new`` in the place of ``folder``, which steps aside for a moment: see :func:`_recover`."""
    _recover(folder)
    if not folder.exists():
        os.replace(new, folder)
        return
    if not any((folder / name).exists() for name in (STATE_FILE, ROWS_FILE, LIST_FILE)) and any(folder.iterdir()):
        raise FileExistsError(f"path: {str(folder)!r} holds other files. Name a new folder, or one of a buffer.")
    old = _aside(folder)
    shutil.rmtree(old, ignore_errors=True)  # of a process that was killed before it was done with it
    os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _recover(folder: Path) -> None:
    """Put back a folder whose process was killed while it was being replaced."""
    if not folder.exists() and _aside(folder).exists():
        os.replace(_aside(folder), folder)


def load(buffer: ReplayBuffer, path: Any) -> None:
    """Read a buffer from a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = Path(path).expanduser().resolve()
    _recover(folder)
    if not (folder / STATE_FILE).is_file():
        raise FileNotFoundError(f"path: {str(folder)!r} holds no saved replay buffer. Name a folder of dumps().")
    state = torch.load(folder / STATE_FILE, weights_only=True)
    storage = buffer.storage
    in_place = isinstance(storage, LazyMemmapStorage) and storage.scratch_dir == folder
    if (folder / LIST_FILE).is_file():
        state["storage"] = torch.load(folder / LIST_FILE, weights_only=True)
    elif not in_place:
        state["storage"] = LazyMemmapStorage(scratch_dir=folder, existsok=True).state_dict()
    restore(buffer, state)
