"""What outlives a replay service: dumps of its buffer, made now and then, and a journal of what no dump has."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from rollwright.data.loading import load_saved, save
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.service.messages import Request, unpack
from rollwright.data.replay_buffers.storages.saving import holds_dump, remove_dump

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.service.server import Keeper


DUMP_FILE = "service.pt"
"""Names the folder of the last dump, and who had written what; it is replaced as a whole."""

JOURNAL_FILE = "service.journal"
_IDS_AHEAD = 1 << 16  # trajectory ids that may be given out before another record is written
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


class Journal:
    """Records what was promised, one record after the other: a dump has the elements alone, and is made now and then.

    A record is a line of JSON, behind which the bytes lie whose numbers it names. One that was cut short by a kill had
    not been acknowledged, and is removed.

    Args:
        folder: where the file is.
        run: name of the program's buffer: changes of its parts are made again for the same one alone.

    Attributes:
        run: see above.
        ids_end: a number above all trajectory ids that were given out.
        given_up: by the name of a writer: the highest generation that was given up.
        requests: changes of parts that were made before this was opened, by the client that asked for them, in order.
        num_requests: changes of parts, those that were made since included.
    """

    def __init__(self, folder: str | Path, run: str) -> None:
        self._file, self.run = Path(folder) / JOURNAL_FILE, run
        self.ids_end = 0
        self.given_up: dict[str, int] = {}
        self.requests: list[tuple[str, Request, list[memoryview]]] = []
        if self._file.is_file():
            with self._file.open("r+b") as file:
                end = 0
                for record, blobs in _records(file):
                    self._take_in(record, blobs)
                    end = file.tell()
                file.truncate(end)
        self.num_requests = len(self.requests)

    def _take_in(self, record: dict[str, Any], blobs: list[memoryview]) -> None:
        match record:
            case {"ids_end": end}:
                self.ids_end = max(self.ids_end, end)
            case {"given_up": name, "generation": generation}:
                self.given_up[name] = max(self.given_up.get(name, -1), generation)
            case {"run": self.run, "client": client, "number": number, "what": what}:
                self.requests.append((client, Request(number, 0, what, bytes(blobs[0])), blobs[1:]))

    def note_ids(self, next_id: int) -> None:
        """Trajectory ids below ``next_id`` are given out; few of these calls write a record."""
        if next_id > self.ids_end:
            self._append({"ids_end": next_id + _IDS_AHEAD})
            self.ids_end = next_id + _IDS_AHEAD

    def note_given_up(self, name: str, generation: int) -> None:
        """A writer was given up, and those that had its place before; written down once."""
        if generation > self.given_up.get(name, -1):
            self._append({"given_up": name, "generation": generation})
            self.given_up[name] = generation

    def note_request(self, client: str, request: Request, pieces: Sequence[memoryview]) -> None:
        """A part of the buffer was changed."""
        record = {"run": self.run, "client": client, "number": request.number, "what": request.what}
        self._append(record, [memoryview(request.body), *pieces])
        self.num_requests += 1

    def _append(self, record: dict[str, Any], blobs: Sequence[memoryview] = ()) -> None:
        """Write a record.

        Raises:
            OSError: it cannot be written.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({**record, "sizes": [blob.nbytes for blob in blobs]}).encode() + b"\n"
        with self._file.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                _write(file, line)
                for blob in blobs:
                    _write(file, blob)
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise


def _write(file: Any, part: bytes | memoryview) -> None:
    left = memoryview(part).cast("B")
    while left.nbytes:
        left = left[file.write(left) :]


def _records(file: BinaryIO) -> Iterator[tuple[dict[str, Any], list[memoryview]]]:
    """Records of a journal up to the one that was cut short, if any; the file is behind each when it is yielded."""
    while True:
        line = file.readline()
        if not line.endswith(b"\n"):
            return
        record = json.loads(line)
        blobs = [memoryview(bytearray(file.read(size))) for size in record["sizes"]]
        if [blob.nbytes for blob in blobs] != record["sizes"]:
            return
        yield record, blobs
