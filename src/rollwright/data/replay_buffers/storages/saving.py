"""Saves the state of one part of a replay buffer, and restores it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollwright.data.loading import load_saved, save
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
