"""Saves the state of one part of a replay buffer, and restores it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rollwright.data.loading import load_saved, save
from rollwright.errors import DamagedFileError

__all__ = ["Part", "dump_part", "load_part"]


class Part(Protocol):
    """A storage, a sampler or a writer, as far as it is saved."""

    def state_dict(self) -> dict[str, Any]:
        """What it holds."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what another one held."""


def dump_part(part: Part, path: str | Path, name: str) -> None:
    """Write the state of a part to the file ``name + ".pt"`` in a folder, which is made where it is not there.

    Raises:
        OSError: the disk is full, or fails; the part that was written is removed, and an older file stays.
    """
    folder = Path(path).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.pt"
    fresh = file.with_name(f"{file.name}.new")
    save(part.state_dict(), fresh)
    os.replace(fresh, file)


def load_part(part: Part, path: str | Path, name: str, *, allow_pickle: bool = False) -> None:
    """Give a part the state that :func:`dump_part` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds objects, and ``allow_pickle`` is not set.
        DamagedFileError: it is cut short, or holds something else.
    """
    file = Path(path).expanduser().resolve() / f"{name}.pt"
    if not file.is_file():
        raise FileNotFoundError(f"path: there is no {file.name} in {str(file.parent)!r}. Name a folder of dumps().")
    state = load_saved(file, allow_pickle=allow_pickle)
    if not isinstance(state, dict):
        raise DamagedFileError(f"{file} holds a {type(state).__name__}, expected the state of a {name}.")
    part.load_state_dict(state)
