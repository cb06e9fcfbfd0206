"""Saves replay buffers, and restores them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwright.data.loading import load_saved, save
from rollwright.data.replay_buffers.storages.folders import LIST_FILE, holds_dump, recover, replacing
from rollwright.data.replay_buffers.storages.memory import ROWS_FILE, STATE_FILE
from rollwright.data.replay_buffers.storages.rows import RowStorage
from rollwright.data.replay_buffers.storages.tensors import LazyMemmapStorage
from rollwright.errors import DamagedFileError

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.buffer import ReplayBuffer

__all__ = ["dump", "load", "restore", "state_of"]


def state_of(buffer: ReplayBuffer, *, with_elements: bool) -> dict[str, Any]:
    """The state of a buffer's parts, all at one time, whatever others write and draw meanwhile.

    Of a buffer that prefetches it is the state after what was drawn: batches that wait to be delivered are not in it.
    """
    with buffer.drawing, buffer.storage.ledger.reading():
        buffer.sampler.follow(buffer.storage)  # what another process wrote, or what was just published
        state = {
            "sampler": buffer.sampler.state_dict(),
            "writer": buffer.writer.state_dict(),
            "generator": None if buffer.generator is None else buffer.generator.get_state(),
        }
        if buffer.limiter is not None:
            state["limiter"] = buffer.limiter.state_dict()
        return {"storage": buffer.storage.state_dict(), **state} if with_elements else state


def restore(buffer: ReplayBuffer, state: Mapping[str, Any]) -> None:
    """Give a buffer's parts a saved state.

    Raises:
        KeyError: it is the state of something else.
        ValueError: its rows lie along another dimension.
    """
    missing = [name for name in ("sampler", "writer") if name not in state]
    if missing:
        raise KeyError(f"state_dict: expected that of a replay buffer, got {sorted(state)}: {missing} missing.")
    stored = state.get("storage")
    _check_dim(buffer, stored)
    buffer.sampler.check_state(state["sampler"])
    with buffer.drawing:
        if stored is not None:
            buffer.storage.load_state_dict(stored)
        buffer.sampler.load_state_dict(state["sampler"])
        buffer.writer.load_state_dict(state["writer"])
        if state.get("generator") is not None and buffer.generator is not None:
            buffer.generator.set_state(state["generator"])
    if buffer.limiter is not None:
        buffer.limiter.load_state_dict(state.get("limiter"))
    elif buffer.insert_limiter is not None:
        buffer.insert_limiter.begin()


def _check_dim(buffer: ReplayBuffer, stored: Mapping[str, Any] | None) -> None:
    """Test that rows lie along the dimension that the buffer takes them from; ``stored``: None: what is there."""
    if stored is not None and stored.get("ndim", buffer.storage.ndim) != buffer.storage.ndim:
        return  # which the storage says
    if stored is None:
        dim = buffer.storage.dim_extend if len(buffer.storage) else buffer.dim_extend
    else:
        dim = stored.get("dim_extend", buffer.dim_extend) if stored.get("elements") is not None else buffer.dim_extend
    if dim != buffer.dim_extend:
        raise ValueError(
            f"state_dict: expected that of a buffer with dim_extend={buffer.dim_extend}, got dim_extend={dim}. "
            f"Make the buffer with dim_extend={dim}."
        )


def dump(buffer: ReplayBuffer, path: Any) -> None:
    """Write a buffer to a folder; of one that holds an older dump, the files of that dump are replaced.

    Raises:
        FileExistsError: the folder holds other files, and no dump.
        OSError: the disk is full, or fails; what was written is removed, and what was there stays.
    """
    folder = Path(path).expanduser().resolve()
    storage = buffer.storage
    if isinstance(storage, LazyMemmapStorage) and storage.scratch_dir == folder:
        save(state_of(buffer, with_elements=False), folder / (STATE_FILE + ".new"))
        os.replace(folder / (STATE_FILE + ".new"), folder / STATE_FILE)  # elements are there already
        storage.flush()
        return
    recover(folder)
    if folder.exists() and any(folder.iterdir()) and not holds_dump(folder):
        raise FileExistsError(f"path: {str(folder)!r} holds other files. Name a new folder, or one of a buffer.")
    with replacing(folder) as new:
        save(state_of(buffer, with_elements=False), new / STATE_FILE)
        state = storage.state_dict()
        if isinstance(storage, RowStorage) and state["elements"] is not None:
            rows = LazyMemmapStorage(storage.requested_size, scratch_dir=new, ndim=storage.ndim)
            rows.load_state_dict(state)
            rows.flush()
        else:
            save(state, new / LIST_FILE)


def load(buffer: ReplayBuffer, path: Any, *, allow_pickle: bool = False) -> None:
    """Read a buffer from a folder.

    Raises:
        ValueError: it holds objects, and ``allow_pickle`` is not set.
        DamagedFileError: a file is cut short, or holds something else.
        FileNotFoundError: there is none.
    """
    folder = Path(path).expanduser().resolve()
    recover(folder)
    if not (folder / STATE_FILE).is_file():
        raise FileNotFoundError(f"path: {str(folder)!r} holds no saved replay buffer. Name a folder of dumps().")
    state = _dict_in(folder / STATE_FILE, allow_pickle)
    storage = buffer.storage
    in_place = isinstance(storage, LazyMemmapStorage) and storage.scratch_dir == folder
    if (folder / LIST_FILE).is_file():
        state["storage"] = _dict_in(folder / LIST_FILE, allow_pickle)
    elif not in_place:
        rows = folder / ROWS_FILE
        if not rows.is_file() or not rows.stat().st_size:
            raise DamagedFileError(f"{rows} is {'empty' if rows.is_file() else 'missing'}: it holds the elements.")
        state["storage"] = LazyMemmapStorage(scratch_dir=folder, existsok=True).state_dict()
    restore(buffer, state)


def _dict_in(file: Path, allow_pickle: bool) -> dict[str, Any]:
    found = load_saved(file, allow_pickle=allow_pickle)
    if not isinstance(found, dict):
        raise DamagedFileError(f"{file} holds a {type(found).__name__}, expected the state of a replay buffer.")
    return found
