"""ServiceReplayBuffer: a replay buffer in a process of its own, as the program that started it uses it; its options."""

from __future__ import annotations

import importlib
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from rollwright._options import Check, check_fields, names_of, refuse_unknown, seconds, whole
from rollwright._processes.channel import dumps
from rollwright._processes.network.handshake import checked_address, checked_secret, parse_address, secret_of
from rollwright.data.replay_buffers._arguments import check_given
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.limiter import SampleToInsertRatio
from rollwright.data.replay_buffers.service.client import ReplayClient
from rollwright.data.replay_buffers.service.connection import ServiceConnection, Target
from rollwright.data.replay_buffers.service.dumps import DUMP_FILE
from rollwright.data.replay_buffers.service.messages import Ready
from rollwright.data.replay_buffers.service.server import Recipe, ServiceHost
from rollwright.data.replay_buffers.storages.batches import positive
from rollwright.errors import ServiceLostError, WorkerError


def _checked_path(name: str, value: Any) -> object:
    if not isinstance(value, str | Path):
        raise TypeError(f"{name}: expected a folder, got {type(value).__name__}: {value!r}.")
    return str(Path(value).expanduser().absolute())


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of a buffer in a process of its own.

    Attributes:
        address: where the service listens, ``"HOST:PORT"``; port 0: any that is free. Clients connect to it as it is
            written, so writers on other machines need a host name or an address that they reach. None: the backend
            chooses.
        secret: that whoever connects has to know; None: the environment variable ``ROLLWRIGHT_SECRET``, or one that is
            made up. Clients carry it along. What is sent after the proof is not encrypted.
        host_timeout: seconds without a sign of life after which the service counts as lost. A shorter silence costs
            time only.
        start_timeout: seconds for the service to start.
        path: folder where the service saves the buffer, and from which it is started again when it has died; None:
            what it holds is lost with it.
        dump_every: elements written between two dumps to ``path``: as many acknowledged elements can be lost at most.
            None: it is saved at the end alone.
        resume: begin with what an earlier service has left in ``path``.
        max_restarts: how often the service is started again.
    """

    address: Annotated[str | None, Check(checked_address)] = None
    secret: Annotated[str | None, Check(checked_secret)] = None
    host_timeout: Annotated[float, seconds(positive=True)] = 30.0
    start_timeout: Annotated[float, seconds(positive=True)] = 120.0
    path: Annotated[str | Path | None, Check(_checked_path)] = None
    dump_every: Annotated[int | None, whole(1)] = None
    resume: bool = False
    max_restarts: Annotated[int, whole(0)] = 3

    def __post_init__(self) -> None:
        check_fields(self)
        secret_of(self.secret)  # that of the environment is checked, too
        if self.path is None and (self.dump_every is not None or self.resume):
            name = "resume" if self.resume else "dump_every"
            raise ValueError(f"{name}: there is no folder to save the buffer in. Pass path= with it.")
        if self.path is not None and not self.resume and (Path(self.path) / DUMP_FILE).exists():
            raise FileExistsError(
                f"path: {str(self.path)!r} holds what an earlier service has saved. Pass resume=True to begin with it, "
                "or name another folder."
            )


BACKENDS = {
    "process": "rollwright.data.replay_buffers.service.process",
    "ray": "rollwright.data.replay_buffers.service.ray",
}
"""By name, the module: it has ``Options``, ``DEFAULT_ADDRESS`` and ``host(recipe, options, before)``."""


def backend_module(name: object) -> Any:
    """The module of a backend.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in BACKENDS:
        raise ValueError(f"service_backend: expected {' or '.join(map(repr, BACKENDS))}, got {name!r}.")
    return importlib.import_module(BACKENDS[str(name)])


def options_of(name: object, given: Mapping[str, Any] | None) -> Any:
    """The options of a backend.

    Raises:
        TypeError, ValueError: one is unknown, or wrong.
    """
    declared = backend_module(name).Options
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"service_backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    owner = f"service_backend_options of service_backend={name!r}"
    refuse_unknown([str(key) for key in given or ()], names_of(declared), owner)
    return declared(**(given or {}))


_END_S = 5.0


class ServiceReplayBuffer(ReplayClient):
    """A replay buffer in a process of its own: what ``ReplayBuffer(service_backend=...)`` makes.

    The service owns the storage, with its sampler, its priorities, its limiter, its trajectory ids and the transforms.
    The program that has started it uses it as it would any buffer; collectors, and other processes with a
    :meth:`client`, write to it, without passing through the program. It ends with the program, or with
    :meth:`shutdown`.

    A write that has returned is stored. One that was on its way when a connection broke is sent again, and stored once.
    If the service dies, everything that is asked raises, with the number of elements that were lost; with ``path`` in
    the options it is started again from its last dump, and a warning has the number.

    Args:
        service_backend: ``"process"`` or ``"ray"``.
        service_backend_options: see :class:`~rollwright.data.replay_buffers.service.buffer.ServiceOptions`, and the
            module of the backend.
        kind: class of the buffer in the service.
        prefetch: number of batches to ask for ahead.
        pin_memory: deliver batches in pinned memory.
        batch_size: elements in a batch.
        limiter: its numbers are the service's; this object is not bound. Use :attr:`ReplayBuffer.limiter`.
        **options: of ``kind``. What they hold is copied into the service; a storage is best given as a callable.

    Attributes:
        num_restarts: how often the service was started again.
        num_lost: elements that were acknowledged, and lost since.

    Raises:
        ValueError, TypeError: an option is wrong, or cannot be sent to a process.
        WorkerError: the buffer could not be made in the service.

    Example:
        >>> from functools import partial
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage
        >>> buffer = ReplayBuffer(storage=partial(LazyTensorStorage, 100), batch_size=8, service_backend="process")
        >>> _ = buffer.extend(TensorDict({"obs": torch.randn(50, 4)}, [50]))
        >>> len(buffer), buffer.sample()["obs"].shape
        (50, torch.Size([8, 4]))
        >>> buffer.shutdown()
    """

    def __init__(
        self,
        *,
        service_backend: str = "process",
        service_backend_options: Mapping[str, Any] | None = None,
        kind: type[ReplayBuffer] = ReplayBuffer,
        prefetch: int | None = None,
        pin_memory: bool = False,
        batch_size: int | None = None,
        limiter: SampleToInsertRatio | None = None,
        **options: Any,
    ) -> None:
        self._backend = backend_module(service_backend)
        self._service_options = own = options_of(service_backend, service_backend_options)
        size = None if batch_size is None else positive("batch_size", batch_size)
        if prefetch is not None:
            prefetch = positive("prefetch", prefetch)
            if size is None:
                raise ValueError("prefetch: batches are asked for ahead, and batch_size is None. Pass both.")
        check_given(None, None, None, options.get("generator"), limiter, pin_memory=pin_memory)
        self._recipe = self._recipe_of(kind, {**options, "batch_size": size, "limiter": limiter})
        self._host: ServiceHost = self._backend.host(self._recipe, own, None)
        self.num_restarts = self.num_lost = 0
        try:
            ready = self._host.await_ready(own.start_timeout)
        except BaseException:
            self._host.end(0.0)
            raise
        self._recipe = self._recipe._replace(address=(self._recipe.address[0], ready.address[1]))
        target = Target(ready.address, self._recipe.secret, own.host_timeout, comes_back=own.path is not None)
        connection = ServiceConnection(target, is_owner=True, revive=self._revive)
        super().__init__(
            target, ready.info, batch_size=size, prefetch=prefetch, pin_memory=pin_memory, connection=connection
        )
        connection.keep_connected()

    def _recipe_of(self, kind: type[ReplayBuffer], options: dict[str, Any]) -> Recipe:
        own = self._service_options
        options.pop("shared", None)  # it is, by the service
        for name, value in options.items():
            try:
                dumps(value)
            except Exception as error:  # an object may refuse in any way it likes
                raise TypeError(
                    f"{name}: cannot be sent to the service's process: {type(error).__name__}: {error} Pass a function "
                    "that makes it, such as storage=partial(LazyTensorStorage, 1000)."
                ) from error
        secret = secret_of(own.secret) or secrets.token_hex(32)
        return Recipe(
            made_of=dumps((kind, options)),
            address=parse_address("address", own.address or self._backend.DEFAULT_ADDRESS),
            secret=secret.encode(),
            seed=int(torch.empty((), dtype=torch.int64, device="cpu").random_()) % 2**62,
            host_timeout=own.host_timeout,
            path=None if own.path is None else str(own.path),
            dump_every=own.dump_every,
            import_paths=tuple(sys.path),
            run=secrets.token_hex(16),
        )

    @property
    def host(self) -> ServiceHost:
        """The process of the service."""
        return self._host

    # Its end ------------------------------------------------------------------------------------------

    def _revive(self) -> bool:
        """In the thread of the connection: start the service again, if it has died and can come back."""
        how = self._host.how_it_ended()
        if how is None:
            return False
        own, counts = self._service_options, self._connection.counts
        written = 0 if counts is None else counts.write_count
        held = 0 if counts is None else counts.num_stored
        if own.path is None:
            raise ServiceLostError(
                f"the replay service {how}: the {held:,} elements that it held are lost ({written:,} were written). "
                "Pass path= and dump_every= in service_backend_options, so that it comes back from its last dump."
            )
        if self.num_restarts >= own.max_restarts:
            raise ServiceLostError(
                f"the replay service {how}, and was started again {self.num_restarts} times before (max_restarts). "
                f"It held {held:,} elements ({written:,} were written); its last dump is in {str(own.path)!r}."
            )
        self.num_restarts += 1
        before, self._host = self._host, self._backend.host(self._recipe, own, self._host)
        before.end(0.0)
        ready: Ready = self._host.await_ready(own.start_timeout)
        lost = max(0, written - ready.write_count)
        self.num_lost += lost
        self._connection.notes.append(
            f"the replay service {how}, and was started again from its last dump: {lost:,} of the {written:,} elements "
            f"that were written are lost (restart {self.num_restarts} of {own.max_restarts} at most)."
        )
        return True

    def stats(self) -> dict[str, Any]:
        """Counts as of :meth:`ReplayBuffer.stats`, and those of the service: restarts, losses, connections.

        ``dump_failure`` says why the buffer could not be saved the last time; None: it could.

        These are the numbers that the service has sent last: nothing is asked.
        """
        counts, capacity = self._connection.counts, self.info.max_size
        num_stored = 0 if counts is None else counts.num_stored
        return {
            "size": num_stored,
            "write_count": 0 if counts is None else counts.write_count,
            "capacity": capacity,
            "utilization": num_stored / capacity,
            "prefetch_queue_size": self._num_ahead(),
            "initialized": self.initialized,
            "num_stored": num_stored,
            "num_restarts": self.num_restarts,
            "num_lost": self.num_lost,
            "num_connections": self.num_connections,
            "dump_failure": None if counts is None else counts.dump_failure,
        }

    @property
    def is_alive(self) -> bool:
        """Whether the service runs, or is started again when it is asked next."""
        if self._connection.is_closed:
            return False
        can_return = self._recipe.path is not None and self.num_restarts < self._service_options.max_restarts
        return can_return or self._host.how_it_ended() is None

    def shutdown(self, timeout: float | None = None) -> None:
        """End the service, which saves what is fresh if it has a ``path``. May be called again.

        Args:
            timeout: seconds that it has for that; None: 5.

        Raises:
            OSError: what is fresh could not be saved. The service has ended; its last dump is as it was.
        """
        raised: Exception | None = None
        if self._recipe.path is not None and not self._connection.is_closed and self._host.how_it_ended() is None:
            try:
                self._connection.ask("finish")
            except Exception as error:
                is_gone = isinstance(error, WorkerError | ConnectionError | TimeoutError | RuntimeError)
                if not is_gone or (isinstance(error, WorkerError) and isinstance(error, OSError)):  # it has raised this
                    raised = error
        self._connection.close()
        self._host.end(_END_S if timeout is None else timeout)
        if raised is not None:
            raise raised
