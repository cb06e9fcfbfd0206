"""Dumps: saves the buffer of a replay service to a folder now and then, and restores it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollwright.data.loading import load_saved, save
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.service.packing import unpack
from rollwright.data.replay_buffers.storages.folders import holds_dump, remove_dump

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.service.serving.keeper import Keeper

__all__ = ["DUMP_FILE", "Dumps"]

DUMP_FILE = "service.pt"
"""Names the folder of the last dump, and who had written what; it is replaced as a whole."""


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

    def when_due(self, keeper: Keeper, *, now: bool = False) -> None:
        """Save, if enough was written since the last time; ``now``: if anything was."""
        fresh = keeper.buffer.write_count - self._saved
        if not fresh or not (now or (self._every is not None and fresh >= self._every)):
            return
        self.dump(keeper)

    def dump(self, keeper: Keeper) -> None:
        """Save."""
        before = self._folder / f"dump-{self._number}"
        self._number += 1
        while (self._folder / f"dump-{self._number}").exists() and not holds_dump(
            self._folder / f"dump-{self._number}"
        ):
            self._number += 1  # the user's; a dump there is of a service that was killed meanwhile, and is replaced
        name = f"dump-{self._number}"
        keeper.buffer.dumps(self._folder / name)
        state = {
            "number": self._number,
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
        save(state, self._folder / (DUMP_FILE + ".new"))
        os.replace(self._folder / (DUMP_FILE + ".new"), self._folder / DUMP_FILE)
        remove_dump(before)
        self._saved = keeper.buffer.write_count


def _is_plain(value: Any) -> bool:
    """Whether it is the result of a write, which a file may hold without a pickle."""
    return value is None or isinstance(value, int | torch.Tensor)
