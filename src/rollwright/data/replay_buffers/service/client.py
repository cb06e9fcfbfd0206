"""ReplayClient: a replay buffer that lies in a service, as any process uses it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright._processes.forks import on_fork
from rollwright._processes.pickling import dumps
from rollwright._processes.threads import Fillers
from rollwright.data.replay_buffers._arguments import Transform, entry_of
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.conditional import ConditionalUpdateResult
from rollwright.data.replay_buffers.samplers.base import GENERATION, Sampler
from rollwright.data.replay_buffers.service.facade import RemoteLedger, RemoteLimiter, RemoteStorage
from rollwright.data.replay_buffers.service.messages import Info, WriterName
from rollwright.data.replay_buffers.service.session import Expected, Session, Target
from rollwright.data.replay_buffers.storages.base import Storage
from rollwright.data.replay_buffers.storages.batches import positive
from rollwright.data.replay_buffers.writers import Writer


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
        session: to the service; None: its own.
        asks: session that is asked what became of the writer's requests; None: its own.
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
        session: Session | None = None,
        asks: Session | None = None,
    ) -> None:
        self._target, self._info, self._writer_name = target, info, writer
        self._session = Session(target, writer) if session is None else session
        self.batch_size, self.pin_memory = batch_size, pin_memory
        self._prefetch = prefetch
        self._ledger = RemoteLedger(self._session, asks or self._session)
        self._set_parts()
        limiter: Any = RemoteLimiter(self._session, info.limiter_timeout_s) if info.has_limiter else None
        self.limiter = self.insert_limiter = limiter
        self._num_transforms = info.num_transforms
        self.fillers = Fillers()
        self.reset_after_fork()
        on_fork(self)

    def _set_parts(self) -> None:
        self.storage = cast(Storage, RemoteStorage(self._info, self._ledger))
        self.dim_extend = self._info.dim_extend

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
        return [f"transform {i} in the service" for i in range(self._num_transforms)]

    @property
    def draws_slices(self) -> bool:
        """Whether the sampler draws stretches of trajectories."""
        return self._info.draws_slices

    @property
    def num_connections(self) -> int:
        """Connections made so far: more than one, where they broke."""
        return self._session.num_connections

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
        return ReplayClient(self._target, self._info, writer, batch_size=self.batch_size, asks=self._session)

    def give_up(self, name: str, generation: int) -> None:
        """Refuse what a writer of this generation, and those before it, send from now on. Does not wait.

        Raises:
            RuntimeError: the service was shut down.
        """
        self._session.post("give_up", name, generation)

    def __reduce__(self) -> Any:
        return _client, (self._target, self._info, self._writer_name, self.batch_size)

    # Writing ------------------------------------------------------------------------------------------

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """See :meth:`ReplayBuffer.extend`; returns when the service has stored it."""
        found: torch.Tensor = self._session.ask("extend", data, update_priority, noted=self._ledger.on_reserve)
        return found

    def extend_pieces(self, batches: Sequence[Any]) -> torch.Tensor:
        """See :meth:`ReplayBuffer.extend_pieces`."""
        found: torch.Tensor = self._session.ask("extend_pieces", list(batches), noted=self._ledger.on_reserve)
        return found

    def add(self, data: Any) -> int | torch.Tensor:
        """See :meth:`ReplayBuffer.add`."""
        found: int | torch.Tensor = self._session.ask("add", data, noted=self._ledger.on_reserve)
        return found

    def written(self) -> None:
        """There is nothing to do: the service does it."""

    def direct_writes(self) -> str | None:
        """Rows are never written in place."""
        return "the buffer is in a service"

    # Sampling -----------------------------------------------------------------------------------------

    def _next(self, batch_size: int | None) -> tuple[Any, dict[str, Any], bool]:
        self.fillers.raise_error()
        size = self.batch_size if batch_size is None else positive("batch_size", batch_size)
        if self._prefetch is None:
            expected = self._session.post("sample", size)
        else:
            if size != self.batch_size:
                raise ValueError(
                    f"batch_size: expected {self.batch_size}, which batches are prefetched with, got {size}. "
                    "Pass it to the constructor alone."
                )
            while len(self._ahead) <= self._prefetch:
                self._ahead.append(self._session.post("sample", size))
            expected = self._ahead.popleft()
        limiter = cast("RemoteLimiter | None", self.limiter)
        try:
            batch, info, ran_out = self._session.result(expected, None if limiter is None else limiter.ask_inserters)
        except BaseException:
            self.drop_prefetched()
            raise
        if limiter is not None:
            limiter.drew()
        return (batch.pin_memory() if self.pin_memory else batch), info, ran_out

    def drop_prefetched(self) -> None:
        """See :meth:`ReplayBuffer.drop_prefetched`."""
        ahead, self._ahead = self._ahead, deque()
        for expected in ahead:
            self._session.abandon(expected)

    def update_priority(self, index: Any, priority: Any, *, generation: Any = None) -> None:
        """See :meth:`ReplayBuffer.update_priority`."""
        self._session.ask("update_priority", index, priority, generation)

    def mark_update(self, index: Any) -> None:
        """See :meth:`ReplayBuffer.mark_update`."""
        self._session.ask("mark_update", index)

    def update_if_present(self, **arguments: Any) -> ConditionalUpdateResult:
        """See :meth:`ReplayBuffer.update_if_present`."""
        found: ConditionalUpdateResult = self._session.ask("update_if_present", arguments)
        return found

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set priorities from a batch of :meth:`sample`, see :class:`TensorDictReplayBuffer`.

        Raises:
            KeyError: the batch has no entry ``priority_key``, or no ``"index"``.
        """
        if not self._info.has_priorities:
            return
        key = cast(NestedKey, self._info.priority_key or "td_error")
        missing = [name for name in (key, "index") if data.get(name, None) is None]
        if missing:
            raise KeyError(f"data: expected the entries {missing}, got {sorted(map(str, data.keys(True)))}.")
        index, generation = cast(torch.Tensor, data.get("index")), data.get(GENERATION, None)
        for _ in range(data.ndim - 1):
            index, generation = index[:, 0], None if generation is None else generation[:, 0]
        self.update_priority(index, data.get(key), generation=generation)

    # Elements -----------------------------------------------------------------------------------------

    def can_sample(self, batch_size: int | None = None) -> bool:
        """See :meth:`ReplayBuffer.can_sample`."""
        return bool(self._session.ask("can_sample", self.batch_size if batch_size is None else batch_size))

    def __len__(self) -> int:
        self.fillers.raise_error()
        return int(self._session.ask("length"))

    def num_given(self) -> int:
        """See :meth:`ReplayBuffer.num_given`."""
        return int(self._session.ask("write_count"))

    def __getitem__(self, index: Any) -> Any:
        """See :meth:`ReplayBuffer.__getitem__`."""
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            return entry_of(self[:], index)
        return self._session.ask("get_elements", index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """See :meth:`ReplayBuffer.__setitem__`."""
        self._session.ask("set_elements", index, value)

    def _set_entries(self, data: Mapping[NestedKey, Any] | TensorDictBase, index: Any) -> None:
        self._session.ask("set_entries", data, index)

    def _num_ahead(self) -> int:
        return len(self._ahead)

    def empty(self, empty_write_count: bool = False) -> None:
        """See :meth:`ReplayBuffer.empty`."""
        self.drop_prefetched()
        self._session.ask("empty", empty_write_count)

    # Transforms and parts -----------------------------------------------------------------------------

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """See :meth:`ReplayBuffer.insert_transform`; a copy of it is applied in the service."""
        self.drop_prefetched()
        self._session.ask("insert_transform", index, dumps(transform), invert)
        self._num_transforms += 1
        return self

    def append_transform(self, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """See :meth:`ReplayBuffer.append_transform`; a copy of it is applied in the service."""
        return self.insert_transform(self._num_transforms, transform, invert=invert)

    def set_sampler(self, sampler: Sampler) -> None:
        """See :meth:`ReplayBuffer.set_sampler`; the service has a copy of it."""
        self._set_part("set_sampler", sampler)

    def set_writer(self, writer: Writer) -> None:
        """See :meth:`ReplayBuffer.set_writer`; the service has a copy of it."""
        self._set_part("set_writer", writer)

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> None:
        """See :meth:`ReplayBuffer.set_storage`; the service has copies of both."""
        self._set_part("set_storage", (storage, collate_fn))

    def _set_part(self, what: str, part: Any) -> None:
        self.drop_prefetched()
        self._info = self._session.ask(what, dumps(part))
        self._set_parts()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """See :meth:`ReplayBuffer.set_rng`; the service goes on from the generator's state."""
        self.drop_prefetched()
        self._session.ask("set_rng", None if generator is None else generator.get_state())

    def check_shareable(self) -> None:
        """See :meth:`ReplayBuffer.check_shareable`: what is sent is a client."""

    def share(self, shared: bool = True) -> ReplayBuffer:
        """There is nothing to do: other processes can use it."""
        return self

    # State --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ReplayBuffer.state_dict`."""
        found: dict[str, Any] = self._session.ask("state_dict")
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`ReplayBuffer.load_state_dict`."""
        self.drop_prefetched()
        self._session.ask("load_state_dict", dict(state_dict))

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """An error: hooks are called where the storage is."""
        raise TypeError(
            f"hook: a {type(self).__name__} saves where its storage is, in the service. Register the hook in the "
            "callable that makes the storage: storage=make, where make() returns one with hooks."
        )

    register_load_hook = register_save_hook

    def dumps(self, path: str | Path) -> None:
        """See :meth:`ReplayBuffer.dumps`; the folder is one of the service's machine."""
        self._session.ask("dumps", str(Path(path).expanduser().absolute()))

    def loads(self, path: str | Path, *, allow_pickle: bool = False) -> None:
        """See :meth:`ReplayBuffer.loads`; the folder is one of the service's machine."""
        self.drop_prefetched()
        self._session.ask("loads", str(Path(path).expanduser().absolute()), allow_pickle)

    dump = save = dumps
    load = loads

    @property
    def is_alive(self) -> bool:
        """Whether this client was not shut down; it does not ask the service."""
        return not self._session.is_closed

    def shutdown(self, timeout: float | None = None) -> None:
        """Hang up; the service goes on."""
        self._session.close()

    def __repr__(self) -> str:
        info = self._info
        return (
            f"{type(self).__name__}({info.kind} with {info.storage}(max_size={info.max_size}) and {info.sampler}, in "
            f"{self._target.name})"
        )


def _client(target: Target, info: Info, writer: WriterName | None, batch_size: int | None) -> ReplayClient:
    return ReplayClient(target, info, writer, batch_size=batch_size)
