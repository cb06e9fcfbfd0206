"""BufferWriters: the workers of a collector as writers of a replay service."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from typing import Any

from rollwright.collectors.delivery_options import is_service
from rollwright.collectors.workers.worker import WorkerSpec


class BufferWriters:
    """Names workers to the replay service that they write, and gives up those that are gone.

    A worker that was given up may still run, on a machine that has been silent: nothing of it is stored any more.

    Args:
        buffer: that the workers write; one that is in no service needs nothing of this.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer if is_service(buffer) else None
        self._name = uuid.uuid4().hex[:12]
        self._generations: dict[int, int] = {}

    def _place(self, index: int) -> str:
        return f"{self._name}/{index}"

    def prepare(self, spec: WorkerSpec) -> WorkerSpec:
        """The spec of a worker that is about to be started: it writes under a name of its own."""
        if self._buffer is None:
            return spec
        generation = self._generations[spec.index] = self._generations.get(spec.index, -1) + 1
        writer = self._buffer.as_writer(self._place(spec.index), generation)
        return dataclasses.replace(spec, options=dataclasses.replace(spec.options, replay_buffer=writer))

    def give_up(self, index: int) -> None:
        """Have nothing stored any more of a worker that is gone. Does not wait."""
        if self._buffer is not None and index in self._generations:
            with contextlib.suppress(RuntimeError):  # the service is gone, too
                self._buffer.give_up(self._place(index), self._generations[index])
