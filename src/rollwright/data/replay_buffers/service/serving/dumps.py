"""Dumps: saves the buffer of a replay service to a folder now and then, and restores it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollwright.data.loading import load_saved, save
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.service.packing import unpack
from rollwright.data.replay_buffers.storages.folders import holds_dump, remove_dump

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.service.serving.keeper import Keeper

DUMP_FILE = "service.pt"
"""Names the folder of the last dump, and who had written what; it is replaced as a whole."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0  # after a dump that has failed


class Dumps:
    """Saves a buffer, with the numbers of the requests that are in it, so that none is carried out twice afterwards.

    Where that fails (the disk is full), the dump of before stays as it is, the buffer goes on, and saving is tried
    again after a pause, which is twice as long each time.

    Args:
        path: the folder.
        every: elements written between two dumps; None: only at the end.

    Attributes:
        failure: why saving has failed the last time; None: it has not.
    """

    def __init__(self, path: str, every: int | None) -> None:
        self._folder, self._every = Path(path), every
        self._saved = 0
        self._number = 0
        self._is_owed = False  # what the last dump holds is no longer there, or what has changed could not be saved
        self._again_at = self._pause_s = 0.0
        self.failure: str | None = None

    def num_changes(self, run: str) -> int:
        """Changes of parts that ``run`` made before the last dump, see :class:`Journal`; 0: it made no dump."""
        if not (self._folder / DUMP_FILE).is_file():
            return 0
        by, count = load_saved(self._folder / DUMP_FILE)["changes"]
        return int(count) if by == run else 0

    def restore(self, buffer: ReplayBuffer) -> tuple[dict[str, int], dict[str, dict[int, Any]]]:
        """Read the last dump, if there is one.

        Returns:
            By client, the last number that is in it; by client and number, results.
        """
        if not (self._folder / DUMP_FILE).is_file():
            return {}, {}
        found: dict[str, Any] = load_saved(self._folder / DUMP_FILE)
        self._number = found["number"]
        buffer.loads(self._folder / found["folder"])
        self._saved = buffer.write_count
        return found["last"], found["answers"]

    def save(self, keeper: Keeper, *, replaced: bool = False) -> None:
        """Save, if enough was written since the last time, and no pause is in progress.

        Args:
            keeper: of the buffer.
            replaced: all elements were: save, however few were written.
        """
        fresh = keeper.buffer.write_count - self._saved
        self._is_owed |= replaced or bool(fresh and self._every is not None and fresh >= self._every)
        if not self._is_owed or time.monotonic() < self._again_at:
            return
        try:
            keeper.note_promises()
            self.dump(keeper)
        except Exception as error:  # the buffer is there, whatever an object does when it is saved
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Saving has failed: try again after a pause."""
        self._is_owed, self.failure = True, str(error)
        if time.monotonic() >= self._again_at:
            self._pause_s = min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            self._again_at = time.monotonic() + self._pause_s

    def finish(self, keeper: Keeper) -> None:
        """Save what the last dump has not.

        Raises:
            OSError: the disk is full, or fails.
        """
        if self._is_owed or keeper.buffer.write_count != self._saved:
            keeper.note_promises()
            self.dump(keeper)

    def dump(self, keeper: Keeper) -> None:
        """Save.

        Raises:
            OSError: the disk is full, or fails; the dump of before is as it was.
        """
        before, number = self._folder / f"dump-{self._number}", self._number + 1
        while (self._folder / f"dump-{number}").exists() and not holds_dump(self._folder / f"dump-{number}"):
            number += 1  # the user's; a dump there is of a service that was killed meanwhile, and is replaced
        name = f"dump-{number}"
        keeper.buffer.dumps(self._folder / name)
        try:
            save(self._described(keeper, number, name), self._folder / (DUMP_FILE + ".new"))
            os.replace(self._folder / (DUMP_FILE + ".new"), self._folder / DUMP_FILE)
        except BaseException:
            remove_dump(self._folder / name)  # nobody would find it, and it takes the space that is lacking
            raise
        remove_dump(before)
        self._number, self._saved = number, keeper.buffer.write_count
        self._is_owed, self.failure, self._again_at, self._pause_s = False, None, 0.0, 0.0

    def _described(self, keeper: Keeper, number: int, name: str) -> dict[str, Any]:
        return {
            "number": number,
            "folder": name,
            "changes": list(keeper.changes),
            "last": {client: record.last for client, record in keeper.records.items()},
            "answers": {
                client: {
                    number: value
                    for number, (reply, pieces) in record.answers.items()
                    if reply.failure is None and _is_plain(value := unpack(reply.body, pieces))
                }
                for client, record in keeper.records.items()
            },
        }


def _is_plain(value: Any) -> bool:
    """Whether it is the result of a write, which a file may hold without a pickle."""
    return value is None or isinstance(value, int | torch.Tensor)
