"""Saves replay buffers, and restores them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwright.data.loading import load_saved, save
from rollwright.data.replay_buffers.storages.memory import ROWS_FILE, STATE_FILE
from rollwright.data.replay_buffers.storages.rows import RowStorage
from rollwright.data.replay_buffers.storages.saving import LIST_FILE, holds_dump, recover, replacing
from rollwright.data.replay_buffers.storages.tensors import LazyMemmapStorage
from rollwright.errors import DamagedFileError

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.buffer import ReplayBuffer
    from rollwright.data.replay_buffers.samplers.sampler import Sampler
    from rollwright.data.replay_buffers.writers import Writer


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


def restore(buffers: Sequence[ReplayBuffer], states: Sequence[Any]) -> None:
    """Give the parts of each buffer a saved state; where anything raises, all buffers are as they were.

    Args:
        buffers: one, or the members of an ensemble.
        states: of :func:`state_of`, or :func:`read`; one for each.

    Raises:
        KeyError, TypeError: it is the state of something else, or entries are missing.
        ValueError: its rows lie along another dimension, or do not fit the storage.
        RuntimeError: somebody is writing into the storage.
    """
    pairs = list(zip(buffers, states, strict=True))
    for buffer, state in pairs:
        _check(buffer, state)
    for buffer in buffers:
        buffer.drop_prefetched()
    with ExitStack() as drawing, ExitStack() as undo:
        for buffer, state in pairs:
            drawing.enter_context(buffer.drawing)
            for name in ("sampler", "writer"):
                part: Sampler | Writer = getattr(buffer, name)
                undo.callback(part.load_state_dict, part.state_dict())
                part.load_state_dict(state[name])
            if state["generator"] is not None and buffer.generator is not None:
                undo.callback(buffer.generator.set_state, buffer.generator.get_state())
                buffer.generator.set_state(state["generator"])
        stored = [(buffer.storage, state["storage"]) for buffer, state in pairs if state["storage"] is not None]
        for storage, elements in stored:
            storage.make_room(elements)
        for storage, elements in stored:  # last: what is stored is too much for a copy to go back to
            storage.load_state_dict(elements)
        undo.pop_all()
    for buffer, state in pairs:
        if buffer.limiter is not None:
            buffer.limiter.load_state_dict(state.get("limiter"))
        elif buffer.insert_limiter is not None:
            buffer.insert_limiter.begin()


def _check(buffer: ReplayBuffer, state: Any) -> None:
    """Test that a buffer takes a state, before anything is changed."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state_dict: expected the state of a replay buffer, a dictionary, got {type(state).__name__}. Pass what "
            "state_dict() gave."
        )
    missing = [name for name in ("storage", "sampler", "writer", "generator") if name not in state]
    if missing:
        raise KeyError(
            f"state_dict: expected that of a replay buffer, got {sorted(map(str, state))}: {missing} missing."
        )
    stored = state["storage"]
    if stored is not None:
        buffer.storage.check_state(stored)
    _check_dim(buffer, stored)
    buffer.sampler.check_state(state["sampler"])
    if buffer.limiter is not None:
        buffer.limiter.check_state(state.get("limiter"))


def _check_dim(buffer: ReplayBuffer, stored: Mapping[str, Any] | None) -> None:
    """Test that rows lie along the dimension that the buffer takes them from; ``stored``: None: what is there."""
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
        ValueError: rows lie in the folder, and a save hook would change them.
        OSError: the disk is full, or fails; what was written is removed, and what was there stays.
    """
    folder = Path(path).expanduser().resolve()
    storage = buffer.storage
    if isinstance(storage, LazyMemmapStorage) and storage.scratch_dir == folder:
        if storage.hooks.save:
            raise ValueError(
                f"path: the rows of the buffer lie in {str(folder)!r} as they are, and a save hook would change them. "
                "Name another folder."
            )
        save(state_of(buffer, with_elements=False), folder / (STATE_FILE + ".new"))
        os.replace(folder / (STATE_FILE + ".new"), folder / STATE_FILE)  # elements are there already
        storage.flush()
        return
    recover(folder)
    if folder.exists() and any(folder.iterdir()) and not holds_dump(folder):
        raise FileExistsError(f"path: {str(folder)!r} holds other files. Name a new folder, or one of a buffer.")
    with replacing(folder) as new:
        save(state_of(buffer, with_elements=False), new / STATE_FILE)
        state = storage.hooks.saved(storage.state_dict(), folder)
        if isinstance(storage, RowStorage) and state["elements"] is not None and not storage.hooks.save:
            rows = LazyMemmapStorage(storage.requested_size, scratch_dir=new, ndim=storage.ndim)
            rows.load_state_dict(state)
            rows.flush()
        else:
            save(state, new / LIST_FILE)


def read(buffer: ReplayBuffer, path: Any, *, allow_pickle: bool = False) -> dict[str, Any]:
    """The state of a buffer that :func:`dump` wrote to a folder, for :func:`restore`.

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
    storage, rows = buffer.storage, folder / ROWS_FILE
    if (folder / LIST_FILE).is_file():
        return {**state, "storage": storage.hooks.loaded(_dict_in(folder / LIST_FILE, allow_pickle), folder)}
    if isinstance(storage, LazyMemmapStorage) and storage.scratch_dir == folder:
        return {**state, "storage": None}  # its rows are there
    if not rows.is_file() or not rows.stat().st_size:
        raise DamagedFileError(f"{rows} is {'empty' if rows.is_file() else 'missing'}: it holds the elements.")
    stored = LazyMemmapStorage(scratch_dir=folder, existsok=True).state_dict()
    return {**state, "storage": storage.hooks.loaded(stored, folder)}


def _dict_in(file: Path, allow_pickle: bool) -> dict[str, Any]:
    found = load_saved(file, allow_pickle=allow_pickle)
    if not isinstance(found, dict):
        raise DamagedFileError(f"{file} holds a {type(found).__name__}, expected the state of a replay buffer.")
    return found
