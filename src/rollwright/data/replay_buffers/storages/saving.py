"""Saves the state of one part of a replay buffer, and restores it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rollwright.data.loading import load_saved, save
from rollwright.errors import DamagedFileError


class Part(Protocol):
    """A storage, a sampler or a writer, as far as it is saved."""

    def state_dict(self) -> dict[str, Any]:
        """What it holds."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what another one held."""


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
    elements = state.get("elements")
    for hook in hooks if elements is not None else ():
        elements = hook(elements, path=Path(path))
    return {**state, "elements": elements}


class HookedPart(Part):
    """A storage as it is written to a folder, and read from it, through its hooks."""

    def __init__(self, storage: Part, hooks: SavingHooks, path: str | Path) -> None:
        self._storage, self._hooks, self._path = storage, hooks, path

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Part`."""
        return self._hooks.saved(self._storage.state_dict(), self._path)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :class:`Part`."""
        self._storage.load_state_dict(self._hooks.loaded(state_dict, self._path))


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
