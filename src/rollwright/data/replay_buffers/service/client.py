"""ReplayClient: a replay buffer that lies in a service, as any process uses it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright._processes.forks import on_fork
from rollwright._processes.threads import Fillers
from rollwright.data.replay_buffers._arguments import priorities_in
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.limiter import SampleToInsertRatio
from rollwright.data.replay_buffers.service.connection import Expected, ServiceConnection, Target
from rollwright.data.replay_buffers.service.messages import Code, Info, WriterName
from rollwright.data.replay_buffers.storages.batches import positive
from rollwright.data.replay_buffers.storages.storage import Storage

_IDS = 64  # trajectory ids that are taken at a time


class RemoteLedger:
    """Trajectory ids of a buffer in a service, and whether writes were carried out.

    Args:
        connection: to the service, of the writer.
        asks: connection that asks whether writes were carried out: that of another process must not use the writer's.

    Attributes:
        on_reserve: called with a number before each write, by which :meth:`was_published` knows it.
    """

    def __init__(self, connection: ServiceConnection, asks: ServiceConnection) -> None:
        self._connection, self._asks = connection, asks
        self._next = self._end = 0
        self.on_reserve: Callable[[int], None] | None = None

    def take_ids(self, n: int) -> int:
        """The first of ``n`` trajectory ids that nobody else was given; they are fetched in blocks."""
        if self._end - self._next < n:
            count = max(n, _IDS)
            self._next = self._connection.ask("storage.ledger.take_ids", count)
            self._end = self._next + count
        first, self._next = self._next, self._next + n
        return first

    def raise_ids(self, least: int) -> int:
        """Give out no id below ``least`` from now on; returns the next one."""
        if least > self._next:
            self._next = self._end = 0
            return int(self._connection.ask("storage.ledger.raise_ids", least))
        return self._next

    def was_published(self, number: int) -> bool:
        """Whether the write of this number of this writer was carried out."""
        return bool(self._asks.ask("was_done", self._connection.client_id, number))

    def await_published(self, stop: Callable[[], bool]) -> None:
        """There is nothing to wait for: what was acknowledged can be read."""


class RemoteStorage(NamedTuple):
    """What is known of the storage of a buffer in a service; see :class:`Info`."""

    ledger: RemoteLedger
    kind: str
    max_size: int
    ndim: int
    keeps_objects: bool
    shared: bool = True

    def __repr__(self) -> str:
        return f"{self.kind}(max_size={self.max_size}, in a service)"


class RemoteLimiter(SampleToInsertRatio):
    """The limiter of a buffer in a service, for those who sample there and for collectors: that one has the counts.

    Args:
        connection: to the service.
        like: has the same numbers.
    """

    def __init__(self, connection: ServiceConnection, like: SampleToInsertRatio) -> None:
        ratio, margin = like.samples_per_insert, like.margin
        super().__init__(ratio, margin=margin, min_size=like.min_size, timeout_s=like.timeout_s)
        self._connection = connection

    @property
    def inserted(self) -> int:
        """Elements written so far, by whatever process."""
        return int(self.stats()["inserted"])

    @property
    def sampled(self) -> int:
        """Elements drawn so far by anyone."""
        return int(self.stats()["sampled"])

    @property
    def balance(self) -> float:
        """How far inserting is ahead of sampling; it stays between ``-margin`` and ``margin``."""
        return float(self.stats()["balance"])

    def _do_others_draw(self) -> bool:
        return True


class ReplayClient(ReplayBuffer):
    """A replay buffer that lies in a service.

    It connects when it is first used. It can be pickled, and sent to any process that reaches the service's address:
    each copy has a connection of its own. Threads may use one at once. What is asked is done once, though a connection
    breaks in the meantime; who waits raises after ``host_timeout`` without a sign of the service.

    Args:
        target: how to reach the service.
        info: on its buffer.
        writer: whose writes these are, where the writer may be given up.
        batch_size: elements in a batch; None: that of the service's buffer.
        prefetch: number of batches to ask for ahead.
        pin_memory: deliver batches in pinned memory.
        connection: to the service; None: its own.
        asks: connection that is asked what became of the writer's requests; None: its own.
    """

    def __init__(
        self,
        target: Target,
        info: Info,
        writer: WriterName | None = None,
        *,
        batch_size: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        connection: ServiceConnection | None = None,
        asks: ServiceConnection | None = None,
    ) -> None:
        self._target, self._writer_name = target, writer
        self._connection = ServiceConnection(target, writer) if connection is None else connection
        self.batch_size, self.pin_memory = batch_size, pin_memory
        self._prefetch = prefetch
        self._ledger = RemoteLedger(self._connection, asks or self._connection)
        self._take_info(info)
        limiter = None if info.limiter is None else RemoteLimiter(self._connection, info.limiter)
        self.limiter = self.insert_limiter = limiter
        self.fillers = Fillers()
        self.reset_after_fork()
        on_fork(self)

    def _take_info(self, info: Info) -> None:
        storage = RemoteStorage(self._ledger, info.storage, info.max_size, info.ndim, info.keeps_objects)
        self._info, self.storage, self.dim_extend = info, cast(Storage, storage), info.dim_extend

    def reset_after_fork(self) -> None:
        """In a forked child: what was prefetched is the parent's."""
        self._ahead: deque[Expected] = deque()

    @property
    def info(self) -> Info:
        """What is known of the buffer without asking."""
        return self._info

    @property
    def transforms(self) -> list[Any]:  # type: ignore[override]  # they are in the service
        """A name for each transform of the service's buffer."""
        return [f"transform {i} in the service" for i in range(self._info.num_transforms)]

    @property
    def draws_slices(self) -> bool:
        """Whether the sampler draws stretches of trajectories."""
        return self._info.draws_slices

    @property
    def num_connections(self) -> int:
        """Connections made so far: more than one, where they broke."""
        return self._connection.num_connections

    # Clients ------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the service."""
        return self._target.address

    def client(self, *, address: tuple[str, int] | None = None) -> ReplayClient:
        """The same buffer for another process, without prefetching.

        Args:
            address: where that process reaches the service, if not at :attr:`address`: a port that is forwarded, say.
        """
        target = self._target if address is None else self._target._replace(address=(address[0], address[1]))
        return ReplayClient(target, self._info, batch_size=self.batch_size)

    def as_writer(self, name: str, generation: int) -> ReplayClient:
        """The same buffer for a writer that may be given up.

        Args:
            name: of the writer's place; others may have it after it.
            generation: how many had it before.
        """
        writer = WriterName(name, generation)
        return ReplayClient(self._target, self._info, writer, batch_size=self.batch_size, asks=self._connection)

    def give_up(self, name: str, generation: int) -> None:
        """Refuse what a writer of this generation, and those before it, send from now on. Does not wait.

        Raises:
            RuntimeError: the service was shut down.
        """
        self._connection.post("give_up", name, generation)

    def __reduce__(self) -> Any:
        return partial(ReplayClient, batch_size=self.batch_size), (self._target, self._info, self._writer_name)

    def direct_writes(self) -> str | None:
        """Rows are never written in place."""
        return "the buffer is in a service"

    # Sampling -----------------------------------------------------------------------------------------

    def draw_batch(self, batch_size: int | None = None) -> tuple[Any, dict[str, Any], bool]:
        """A batch, what the sampler returned with it, and whether it ended a pass of the sampler."""
        self.fillers.raise_error()
        size = self.batch_size if batch_size is None else positive("batch_size", batch_size)
        if self._prefetch is None:
            expected = self._connection.post("draw_batch", size)
        else:
            if size != self.batch_size:
                raise self._not_prefetched(size)
            while len(self._ahead) <= self._prefetch:
                self._ahead.append(self._connection.post("draw_batch", size))
            expected = self._ahead.popleft()
        limiter = self.limiter
        try:
            batch, info, ran_out = self._connection.result(expected, None if limiter is None else limiter.ask_inserters)
        except BaseException:
            self.drop_prefetched()
            raise
        if limiter is not None:
            limiter.drew()
        return (batch.pin_memory() if self.pin_memory else batch), info, ran_out

    def drop_prefetched(self) -> None:
        """Drop the batches that were prefetched: they would not be drawn so any more."""
        ahead, self._ahead = self._ahead, deque()
        for expected in ahead:
            self._connection.abandon(expected)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set priorities from a batch of :meth:`sample`, see :class:`TensorDictReplayBuffer`.

        Raises:
            KeyError: the batch has no entry ``priority_key``, or no ``"index"``.
        """
        if self._info.has_priorities:
            self.update_priority(**priorities_in(data, cast(NestedKey, self._info.priority_key or "td_error")))

    def num_held(self) -> int:
        """Its length, for reports: no error of who fills the buffer is raised."""
        return int(self._connection.ask("__len__"))

    def _num_ahead(self) -> int:
        return len(self._ahead)

    # Parts and state ----------------------------------------------------------------------------------

    def check_shareable(self) -> None:
        """Do nothing: what is sent to other processes is a client."""

    def share(self, shared: bool = True) -> ReplayBuffer:
        """There is nothing to do: other processes can use it."""
        return self

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """An error: hooks are called where the storage is."""
        raise TypeError(
            f"hook: a {type(self).__name__} saves where its storage is, in the service. Register the hook in the "
            "callable that makes the storage: storage=make, where make() returns one with hooks."
        )

    register_load_hook = register_save_hook

    def dumps(self, path: str | Path) -> None:
        """Write the buffer to a folder of the service's machine, see :meth:`ReplayBuffer.dumps`."""
        self._connection.ask("dumps", str(Path(path).expanduser().absolute()))

    def loads(self, path: str | Path, *, allow_pickle: bool = False) -> None:
        """Read a folder of the service's machine, see :meth:`ReplayBuffer.loads`."""
        self.drop_prefetched()
        self._connection.ask("loads", str(Path(path).expanduser().absolute()), allow_pickle=allow_pickle)

    dump = save = dumps
    load = loads

    @property
    def is_alive(self) -> bool:
        """Whether this client was not shut down; it does not ask the service."""
        return not self._connection.is_closed

    def shutdown(self, timeout: float | None = None) -> None:
        """Close the connection; the service goes on."""
        self._connection.close()

    def __repr__(self) -> str:
        info = self._info
        return (
            f"{type(self).__name__}({info.kind} with {info.storage}(max_size={info.max_size}) and {info.sampler}, in "
            f"{self._target.name})"
        )


def _asked(path: str, *, writes: bool = False, drops: bool = False, changes_parts: bool = False) -> Any:
    """A method of :class:`ReplayBuffer`, or of a part of it, that the buffer in the service carries out.

    Args:
        path: of the method, from the buffer.
        writes: it stores elements: the ledger hears of the request's number.
        drops: what was prefetched would not be drawn so any more.
        changes_parts: what it is given is code, of which the service has a copy; it returns the buffer.
    """

    def ask(self: Any, *args: Any, **options: Any) -> Any:
        if drops:
            self.drop_prefetched()
        if not changes_parts:
            return self._connection.ask(path, *args, noted=self._ledger.on_reserve if writes else None, **options)
        self._connection.ask(path, *map(Code, args), **{name: Code(value) for name, value in options.items()})
        self._take_info(self._connection.ask("info"))
        return self

    declared = SampleToInsertRatio if path.startswith("limiter.") else ReplayBuffer
    return functools.wraps(attrgetter(path.removeprefix("limiter."))(declared))(ask)


for _name in ("extend", "extend_pieces", "add"):
    setattr(ReplayClient, _name, _asked(_name, writes=True))
for _name in ("update_priority", "mark_update", "update_if_present", "__getitem__", "__setitem__", "_set_entries"):
    setattr(ReplayClient, _name, _asked(_name))
for _name in ("can_sample", "num_given", "state_dict"):
    setattr(ReplayClient, _name, _asked(_name))
for _name in ("empty", "load_state_dict"):
    setattr(ReplayClient, _name, _asked(_name, drops=True))
for _name in ("insert_transform", "set_sampler", "set_writer", "set_storage", "set_rng"):
    setattr(ReplayClient, _name, _asked(_name, drops=True, changes_parts=True))
for _name in ("check", "may_insert", "wants", "stats"):
    setattr(RemoteLimiter, _name, _asked(f"limiter.{_name}"))
