"""Service: the process in which a buffer lies, and how it is started."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from rollwright._memory import keep_freed_memory
from rollwright.data.replay_buffers.service.messages import Ready
from rollwright.data.replay_buffers.service.serving.dumps import Dumps, Journal
from rollwright.data.replay_buffers.service.serving.keeper import Keeper
from rollwright.data.replay_buffers.service.serving.server import Server
from rollwright.data.replay_buffers.storages.base import Storage

_MOST_BEAT_S = 1.0


class Recipe(NamedTuple):
    """What a service is made of.

    Attributes:
        made_of: a pickle of the buffer's class and its options.
        address: where to listen.
        secret: of the run.
        seed: of random numbers.
        host_timeout: seconds without a sign after which somebody counts as gone.
        path: where to save the buffer; None: nowhere.
        dump_every: elements between two dumps.
        import_paths: where modules are looked for, after those of the process.
        run: name of the buffer, the same as long as its owner lives.
    """

    made_of: bytes
    address: tuple[str, int]
    secret: bytes
    seed: int
    host_timeout: float
    path: str | None
    dump_every: int | None
    import_paths: tuple[str, ...]
    run: str


class ServiceHost(Protocol):
    """The process of a service."""

    def await_ready(self, timeout_s: float) -> Ready:
        """Wait until the service listens.

        Raises:
            WorkerError: the buffer could not be made there, or the process has ended.
            TimeoutError: it takes too long.
        """

    def how_it_ended(self) -> str | None:
        """A phrase; None: it runs, as far as is known."""

    def end(self, timeout_s: float) -> None:
        """Make it end, if it does not by itself in time."""


class Service:
    """A buffer, and the server that others reach it by.

    Args:
        recipe: what it is made of.
    """

    def __init__(self, recipe: Recipe) -> None:
        keep_freed_memory()  # each request and each batch has memory of its own, of the same sizes
        sys.path.extend(path for path in recipe.import_paths if path not in sys.path)
        torch.manual_seed(recipe.seed)
        kind, options = pickle.loads(recipe.made_of)
        if isinstance(options.get("storage"), Storage):
            options["storage"].move_here()
        dumps = None if recipe.path is None else Dumps(recipe.path, recipe.dump_every)
        journal = None if recipe.path is None else Journal(recipe.path, recipe.run)
        self._keeper = Keeper(kind(**options), dumps, journal)
        self._server = _listening(self._keeper, recipe)
        host, port = recipe.address[0], self._server.address[1]
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.ready = Ready((shown, port), self._keeper.info, self._keeper.buffer.write_count)
        self.watch = self._server.watch

    def serve(self, stopping: Callable[[], bool]) -> None:
        """Serve until asked to stop, or until something raises; save what is fresh at the end."""
        try:
            while not stopping():
                self._server.run_once()
        finally:
            try:
                self._keeper.finish()
            finally:
                self._server.close()


def _listening(keeper: Keeper, recipe: Recipe) -> Server:
    address, beat_s = recipe.address, min(_MOST_BEAT_S, recipe.host_timeout / 4)
    try:
        return Server(keeper, address, recipe.secret, beat_s=beat_s, silence_s=recipe.host_timeout)
    except OSError as error:
        raise OSError(
            error.errno,
            f"service_backend_options['address']: cannot listen at {address[0]}:{address[1]}: "
            f"{os.strerror(error.errno or 0)}. Pass an address of the machine where the service runs, with a port that "
            "is free; port 0: any that is",
        ) from error
