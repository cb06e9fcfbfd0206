"""Dumps: saves the buffer of a replay service to a folder now and then, and restores it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollwright.data.loading import load_saved, save
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.service.packing import unpack

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.service.keeper import Keeper

__all__ = ["DUMP_FILE", "IDS_FILE", "Dumps"]

DUMP_FILE = "service.pt"
"""Names the folder of the last dump, and who had written what; it is replaced as a whole."""
IDS_FILE = "trajectory_ids"
"""A number above all trajectory ids that were given out, whether they are in a dump or not."""

_IDS_AHEAD = 1 << 16  # that may be given out before that file is written again


class Dumps:
    """Saves a buffer, with the numbers of the requests that are in it, so that none is carried out twice afterwards.

    Args:
        path: the folder.
        every: elements written between two dumps; None: only at the end.
    """

    def __init__(self, path: str, every: int | None) -> None:
        self._folder, self._every = Path(path), every
        self._saved = 0
        self._number = 0
        self._ids_end = 0

    def note_ids(self, end: int) -> None:
        """Trajectory ids below ``end`` are given out: none of them is again, whatever else the last dump lacks."""
        if end > self._ids_end:
            self._folder.mkdir(parents=True, exist_ok=True)
            fresh = self._folder / (IDS_FILE + ".new")
            fresh.write_text(str(end + _IDS_AHEAD))
            os.replace(fresh, self._folder / IDS_FILE)
            self._ids_end = end + _IDS_AHEAD

    def restore(self, buffer: ReplayBuffer) -> tuple[dict[str, int], dict[str, dict[int, Any]], dict[str, int]]:
        """Read the last dump, if there is one. Trajectory ids begin above all that were given out, dumped or not.

        Returns:
            By client, the last number that is in it; by client and number, results; the generations that may write.
        """
        found: dict[str, Any] = {"last": {}, "answers": {}, "least": {}}
        if (self._folder / DUMP_FILE).is_file():
            found = load_saved(self._folder / DUMP_FILE)
            self._number = found["number"]
            buffer.loads(self._folder / found["folder"])
            self._saved = buffer.write_count
        if (self._folder / IDS_FILE).is_file():
            self._ids_end = int((self._folder / IDS_FILE).read_text())
            buffer.storage.ledger.raise_ids(self._ids_end)
        return found["last"], found["answers"], found["least"]

    def when_due(self, keeper: Keeper, *, now: bool = False) -> None:
        """Save, if enough was written since the last time; ``now``: if anything was."""
        fresh = keeper.buffer.write_count - self._saved
        if not fresh or not (now or (self._every is not None and fresh >= self._every)):
            return
        self._dump(keeper)

    def _dump(self, keeper: Keeper) -> None:
        self._number += 1
        name, before = f"dump-{self._number}", f"dump-{self._number - 1}"
        shutil.rmtree(self._folder / name, ignore_errors=True)  # of a service that was killed meanwhile
        keeper.buffer.dumps(self._folder / name)
        state = {
            "number": self._number,
            "folder": name,
            "last": {client: record.last for client, record in keeper.records.items()},
            "answers": {
                client: {
                    number: value
                    for number, (reply, pieces) in record.answers.items()
                    if reply.failure is None and _is_plain(value := unpack(reply.body, pieces))
                }
                for client, record in keeper.records.items()
            },
            "least": dict(keeper.least),
        }
        save(state, self._folder / (DUMP_FILE + ".new"))
        os.replace(self._folder / (DUMP_FILE + ".new"), self._folder / DUMP_FILE)
        shutil.rmtree(self._folder / before, ignore_errors=True)
        self._saved = keeper.buffer.write_count


def _is_plain(value: Any) -> bool:
    """Whether it is the result of a write, which a file may hold without a pickle."""
    return value is None or isinstance(value, int | torch.Tensor)
