"""Journal: what a replay service has promised beside the elements of its buffer, in a file that outlives it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rollwright.data.replay_buffers.service.messages import Request

JOURNAL_FILE = "service.journal"
_IDS_AHEAD = 1 << 16  # trajectory ids that may be given out before another record is written


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
