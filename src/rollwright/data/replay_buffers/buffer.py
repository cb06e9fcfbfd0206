"""ReplayBuffer: a storage, filled by a writer and read by a sampler."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright._options import with_options
from rollwright._processes.forks import on_fork
from rollwright._processes.threads import Fillers
from rollwright.data.entries import entries_of, table_of
from rollwright.data.replay_buffers import checkpoint
from rollwright.data.replay_buffers._arguments import (
    Inverted,
    Transform,
    applied,
    changed,
    check_given,
    checked_transform,
    consuming,
    dimension,
    ends_slices,
    entry_of,
    insert,
    inverse_of,
    inverted,
    made,
    parts_of,
    size_of_batch,
    stacked,
    with_info,
)
from rollwright.data.replay_buffers._threads import Prefetcher
from rollwright.data.replay_buffers.conditional import (
    ConditionalUpdateResult,
    set_entries,
    still_there,
    update_if_present,
)
from rollwright.data.replay_buffers.limiter import Counts, SampleToInsertRatio
from rollwright.data.replay_buffers.samplers.sampler import Draw, Sampler, draw_and_read, mark_rest
from rollwright.data.replay_buffers.samplers.uniform import RandomSampler
from rollwright.data.replay_buffers.storages.batches import pieces, positive
from rollwright.data.replay_buffers.storages.rows import RowStorage
from rollwright.data.replay_buffers.storages.storage import ListStorage, Storage
from rollwright.data.replay_buffers.writers import RoundRobinWriter, Writer

_SERVICE = "rollwright.data.replay_buffers.service.buffer"


@with_options()
class ReplayBuffer:
    """Stores experience and samples from it.

    Threads may write and sample at the same time; with ``shared=True``, processes may, too. A batch has only elements
    that were completely written, whatever is written or killed in the meantime.

    Args:
        storage: keeps the elements; or a function that makes it. Default: ``ListStorage(1000)``.
        sampler: decides which elements a batch has; or a function that makes it. Default: uniform.
        writer: decides where new elements go; or a function that makes it. Default: one after the other, over the
            oldest.
        collate_fn: makes a batch of the list of elements of a ``ListStorage`` (default: stacks tensors and
            TensorDicts). Also applied to the batches of other storages.
        pin_memory: return batches in pinned memory, which a GPU reads without another copy.
        prefetch: number of batches to prepare ahead, in threads.
        transform: applied to each batch: a transform, a module or a function. If it has an inverse (a method ``inv``),
            the inverse is applied to what is written.
        transform_factory: makes the transform, in place of ``transform``.
        batch_size: elements in a batch; ``sample`` may override it.
        dim_extend: dimension of the data along which elements are added; default: the last one of the storage.
        generator: random generator; default: torch's global one.
        shared: let other processes write and sample. Pass the buffer to them when you start them. Without it, the
            buffer is shared when ``multiprocessing`` sends it to a process.
        limiter: keeps sampling and collecting at one pace: whichever is ahead waits.
        service_backend: keep the buffer in a process of its own, which workers on any machine can write to.
            ``"process"``: on this machine. ``"ray"``: in an actor. The result is a
            :class:`~rollwright.data.replay_buffers.service.buffer.ServiceReplayBuffer`.
        service_backend_options: options of that backend; see there.
        consume_after_n_samples: draw each element this many times only; see
            :class:`~rollwright.data.replay_buffers.samplers.uniform.ConsumingSampler`. ``len`` counts what is left.
        delayed_init, compilable: no effect, for programs that were written for TorchRL.

    Attributes:
        limiter: the argument of this name.
        insert_limiter: the limiter that a collector asks before it writes: this one, or that of the ensemble.
        dim_extend: dimension of the data along which elements are added.
        drawing: lock that is held while elements are drawn and while the sampler is changed.
        fillers: collectors of this process that fill the buffer in the background. Their errors are raised once, also
            by the next ``sample()``, ``len()`` or :attr:`write_count`.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=32)
        >>> _ = buffer.extend(TensorDict({"obs": torch.randn(50, 4)}, [50]))
        >>> len(buffer), buffer.write_count, buffer.sample()["obs"].shape
        (50, 50, torch.Size([32, 4]))
    """

    if not TYPE_CHECKING:  # for type checkers, a buffer in a service is one like others

        def __new__(cls, *args: Any, **options: Any) -> Any:
            """A buffer of this process, or one in a service."""
            made = super().__new__(cls)
            if options.get("service_backend") in (None, "direct") or hasattr(cls, "as_writer"):
                return made
            if args:
                raise TypeError(
                    f"service_backend: expected arguments of a {cls.__name__} in a service by name, got {len(args)} by "
                    "position. Name them."
                )
            service: Any = importlib.import_module(_SERVICE).ServiceReplayBuffer
            return service.__new__(service) if issubclass(service, cls) else service(kind=cls, **options)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ForkingPickler.register(cls, _send)

    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | None = None,
        transform_factory: Callable[[], Transform] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        limiter: SampleToInsertRatio | None = None,
        service_backend: str | None = None,
        service_backend_options: dict[str, Any] | None = None,
        consume_after_n_samples: int | None = None,
        delayed_init: bool | None = None,
        compilable: bool | None = None,
    ) -> None:
        if service_backend_options:
            raise ValueError(
                "service_backend_options is for a buffer in a process of its own, and service_backend is None. Pass "
                "service_backend='process' or 'ray'."
            )
        self.storage: Storage = made("storage", storage, Storage, lambda: ListStorage(1000))
        if consume_after_n_samples is not None:
            sampler = consuming(consume_after_n_samples, sampler, prefetch, shared)
        self.sampler: Sampler = made("sampler", sampler, Sampler, RandomSampler)
        self.writer: Writer = made("writer", writer, Writer, RoundRobinWriter)
        self.writer.register_storage(self.storage)
        check_given(collate_fn, transform, transform_factory, generator, limiter, pin_memory=pin_memory)
        self.transforms: list[Transform] = []
        self.collate_fn, self.pin_memory = collate_fn, bool(pin_memory)
        self.batch_size = None if batch_size is None else positive("batch_size", batch_size)
        self.generator = generator
        self._dim_given = dim_extend
        room = getattr(self.sampler, "max_capacity", self.storage.requested_size)
        if room < self.storage.requested_size and not isinstance(self.storage, ListStorage):
            raise ValueError(
                f"max_capacity: expected at least {self.storage.requested_size}, the storage's size, in "
                f"{type(self.sampler).__name__}, got {room}. Pass the storage's max_size."
            )
        self.dim_extend = dimension("dim_extend", dim_extend, self.storage.ndim)
        self._prefetch = prefetch and positive("prefetch", prefetch)
        if shared:
            self.check_shareable()
            self.storage.share()
        self.limiter = self.insert_limiter = limiter
        if limiter is not None:
            limiter.bind(self._counts(), self.batch_size)
        self._start()
        change = transform_factory() if transform_factory is not None else transform
        if change is not None:
            self.append_transform(change)

    def _start(self) -> None:
        self.fillers = Fillers()
        self.reset_after_fork()
        on_fork(self, lambda buffer: buffer.drawing)  # the sampler has to be whole there
        size = cast(int, self.batch_size)
        self._prefetcher = Prefetcher(self._prefetch, partial(self._sample, size)) if self._prefetch else None

    def reset_after_fork(self) -> None:
        """Begin with a lock that nobody holds."""
        self.drawing = threading.RLock()

    def _counts(self) -> Counts:
        return Counts(
            write_count=self.num_given,
            num_stored=lambda: len(self.storage),
            can_draw=lambda: True,
            is_shared=lambda: self.storage.shared,
            max_size=self.storage.max_size,
        )

    # Writing ----------------------------------------------------------------------------------

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Store a batch.

        Args:
            data: ``[n]`` or more dimensions for a storage of ``ndim=1``, whose elements are those of the first; with
                ``ndim=2`` a batch ``[B, T]``, and so on. A tensor, a TensorDict, a tensorclass, or a dictionary or
                tuple of those; a list is one of elements.
            update_priority: False: the data's entry ``priority_key`` is no first priority, see
                :class:`~rollwright.data.replay_buffers.kinds.TensorDictReplayBuffer`; others have no such entry.

        Returns:
            Where elements lie, int64 ``[n]``; -1: there was no room. With ``ndim=2`` ``[n, 2]``, time first:
            ``index.reshape(T, B, 2)[t, b]`` is that of ``data[b, t]``.

        Raises:
            KeyError, ValueError, TypeError: the data do not fit what the storage holds.
        """
        given = self._inverted(data)
        if given is None and data is not None:
            return self._nothing()
        return self._store(given, update_priority is not False)

    def extend_pieces(self, batches: Sequence[Any]) -> torch.Tensor:
        """Store batches one after the other, without joining them first; they come to light together.

        Raises:
            ValueError: they are more than the storage has room for.
        """
        given = [batch for batch in map(self._inverted, batches) if batch is not None]
        return self._store(pieces(given)) if given else self._nothing()

    def _store(self, data: Any, prioritise: bool = True) -> torch.Tensor:
        self.sampler.check(self.storage, data)
        self._check_new(data, _num_elements(data, self.storage.ndim), prioritise)
        index = self.writer.extend(self.storage, data, self.dim_extend)
        self.written()
        where = self._indices(data, index, prioritise)
        if self._sampler_listens:
            with self.drawing:
                self.sampler.extend(where[torch.from_numpy(index >= 0)])
        return where

    def add(self, data: Any) -> int | torch.Tensor:
        """Store one element (for a storage of several dimensions: one step of all environments).

        Returns:
            Where it lies: an int, or int64 ``[n, ndim]``; int64 ``[0]`` where a transform left nothing to be stored.
        """
        given, data = data, self._inverted(data)
        if data is None and given is not None:
            return self._nothing()
        self._check_new(data, self.storage.columns if len(self.storage) else _num_elements(data, self.storage.ndim - 1))
        index = self.writer.add(self.storage, data, self.dim_extend)
        self._notify_limiter()
        where = self._indices(data, index)
        only = int(where[0]) if where.ndim == 1 and len(where) == 1 else where
        if self._sampler_listens and (index >= 0).all():
            with self.drawing:
                self.sampler.add(only)
        return only

    @property
    def _sampler_listens(self) -> bool:
        """Whether the sampler, of a class of the user's, wants to learn where elements are written."""
        kind = type(self.sampler)
        return kind.extend is not Sampler.extend or kind.add is not Sampler.add

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of entries that batches get besides those that are stored."""
        return ()

    def _check_new(self, data: Any, each: int, prioritise: bool = True) -> None:
        """Test what ``each`` elements bring along, before any is stored."""

    def _nothing(self) -> torch.Tensor:
        """The index of no elements: a transform has left nothing to be stored."""
        return self.storage.public(np.zeros(0, np.int64))

    def _indices(self, data: Any, index: NDArray[np.int64], prioritise: bool = True) -> torch.Tensor:
        return self.storage.public(index)

    def written(self) -> None:
        """Let the sampler take in what was written; :meth:`extend` does, whoever writes rows in place has to."""
        if not self.storage.shared:
            with self.drawing, self.storage.ledger.reading():
                self.sampler.follow(self.storage)
        self._notify_limiter()

    def _notify_limiter(self) -> None:
        if self.insert_limiter is not None:
            self.insert_limiter.inserted_more()

    def direct_writes(self) -> str | None:
        """Why rows cannot be written in place, as a phrase; None where they can."""
        if not isinstance(self.storage, RowStorage):
            return f"{type(self.storage).__name__} has no rows of tensors"
        if not self.writer.in_order:
            return f"{type(self.writer).__name__} decides where elements go"
        if any(inverse_of(change) is not None for change in self.transforms):
            return "a transform of the buffer has an inverse"
        if self.storage.device != torch.device("cpu"):
            return f"the storage is on {self.storage.device}"
        if self.dim_extend != self.storage.ndim - 1:
            return f"dim_extend is {self.dim_extend}"
        if self._sampler_listens:
            return f"{type(self.sampler).__name__} learns of each extend()"
        return None

    # Sampling ---------------------------------------------------------------------------------

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], include_info: bool | None = None
    ) -> tuple[Any, dict[str, Any]]: ...
    @overload
    def sample(
        self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None
    ) -> Any: ...
    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """A batch of elements, copied.

        Args:
            batch_size: elements in it; default: the buffer's.
            return_info: return ``(batch, info)``, where ``info`` has ``"index"`` and what else the sampler returns.
            include_info: whether the batch, a TensorDict, has the entries of ``info``; default: that of a
                :class:`~rollwright.data.replay_buffers.kinds.TensorDictReplayBuffer` has, others have not.

        Raises:
            RuntimeError: the buffer is empty; with a limiter: nobody else could fill it.
            Exception: what ended the background collection of a collector that fills the buffer; once.
            ValueError: no batch size is known, or the sampler cannot fill it.
            TimeoutError: the limiter waited in vain.
        """
        batch, info, _ = self.draw_batch(batch_size)
        if include_info is not None:
            batch = with_info(batch, info) if include_info else _without_info(batch, info)
        return (batch, info) if return_info else batch

    def draw_batch(self, batch_size: int | None = None) -> tuple[Any, dict[str, Any], bool]:
        """A batch, what the sampler returned with it, and whether it ended a pass of the sampler."""
        self.fillers.raise_error()
        size = size_of_batch(batch_size, self.batch_size)
        if self._prefetcher is not None and size != self.batch_size:
            raise self._not_prefetched(size)
        if self.limiter is None:
            return self._drawn(size)
        return self.limiter.draw(size, lambda: self._drawn(size), lambda drawn: len(drawn[1]["index"]))

    def _not_prefetched(self, size: int | None) -> ValueError:
        return ValueError(
            f"batch_size: expected {self.batch_size}, which batches are prefetched with, got {size}. Pass it to the "
            "constructor alone."
        )

    def _drawn(self, size: int) -> tuple[Any, dict[str, Any], bool]:
        return self._sample(size, contextlib.nullcontext()) if self._prefetcher is None else self._prefetcher.next()

    def _sample(self, size: int, turn: contextlib.AbstractContextManager[None]) -> tuple[Any, dict[str, Any], bool]:
        storage = self.storage
        storage.ledger.settle()
        with turn, self.drawing:
            draw, data = self._read(size)
            ran_out = self.sampler.ran_out
        if storage.structured:
            data = storage.restored(self.sampler.mark(data, draw))
        batch = self._collated(data)
        info: Mapping[str, Any] = {"index": storage.public(draw.index), **draw.info}
        if isinstance(batch, TensorDictBase):
            batch = self._with_info(self.sampler.mark(batch, draw), info)
        for change in self.transforms:
            if ends_slices(change):
                draw = draw.of(None)
            batch, info = changed(change, batch, info, partial(mark_rest, self.sampler, draw))
        return (batch.pin_memory() if self.pin_memory else batch), dict(info), ran_out

    def _read(self, size: int) -> tuple[Draw, Any]:
        """Draw elements, and read them; whoever holds :attr:`drawing` calls it."""
        tracks = self.writer.tracks_generations
        return draw_and_read(self.storage, self.sampler, size, self.generator, type(self).__name__, tracks)

    def _collated(self, data: Any) -> Any:
        if self.collate_fn is not None:
            return self.collate_fn(data)
        return stacked(data) if isinstance(data, list) else data

    def _with_info(self, batch: TensorDictBase, info: Mapping[str, Any]) -> TensorDictBase:
        """The batch with what the sampler returned for its elements, where the buffer delivers that."""
        return batch

    def drop_prefetched(self) -> None:
        """Drop the batches that were prefetched: they would not be drawn so any more."""
        if self._prefetcher is not None:
            self._prefetcher.drop()

    def next(self) -> Any:
        """A batch: what :meth:`sample` gives."""
        return self.sample()

    def __iter__(self) -> Iterator[Any]:
        """Sample for ever, or until a sampler without replacement has delivered everything once."""
        if self.batch_size is None:
            raise ValueError("batch_size: expected it in the constructor to iterate over the buffer, got None.")
        while True:
            batch, _, ran_out = self.draw_batch()
            yield batch
            if ran_out:
                return

    def update_priority(self, index: Any, priority: Any, *, generation: Any = None) -> None:
        """Set the priorities of elements, for samplers that have them.

        Args:
            index: as ``sample`` and ``extend`` give it.
            priority: at least 0, one for each; a number for all. With the index of ``extend``, those of the batch that
                was written, ``[*batch, ...]``, too.
            generation: ``"index_generation"`` of the batch, of a writer that tracks it: elements that were overwritten
                since they were drawn are left out.
        """
        flat = self.storage.flat(index)
        priority = self.storage.in_index_order(priority, flat, self.dim_extend)
        with self.drawing, self.storage.ledger.reading():
            if generation is not None:
                flat = np.where(still_there(self.storage, flat, generation), flat, -1)
            self.sampler.update_priority(torch.from_numpy(flat), priority, storage=self.storage)

    def mark_update(self, index: Any) -> None:
        """Let elements count as new, for samplers that have priorities: they get that of a new element.

        Args:
            index: as ``sample`` and ``extend`` give it.
        """
        flat = self.storage.flat(index)
        with self.drawing, self.storage.ledger.reading():
            self.sampler.mark_update(torch.from_numpy(flat), storage=self.storage)

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Mapping[NestedKey, Any] | TensorDictBase,
        version_key: NestedKey | None = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Change entries of elements, except those that were overwritten or dropped since they were drawn.

        All of the patch is checked before anything is written, and all of it comes to light at once. Samplers that keep
        what they have read of the storage (slices, versions) look at all of it again.

        Args:
            index: ``"index"`` of a batch, int64 ``[n]`` or ``[n, ndim]``.
            generation: ``"index_generation"`` of the batch, int64 ``[n]``.
            patch: new values of some entries, ``[n, ...]`` each. With the index of :meth:`extend`, those of the batch
                that was written, ``[*batch, ...]``, too.
            version_key: an entry of one number for each element, that of the version of what is stored: elements are
                changed where ``version`` is at least that, and get it. Of an element that is named twice, the newest
                version counts.
            version: of the patch, one number or ``[n]`` (or ``[*batch]``).
            require_newer: change elements where ``version`` is larger only.

        Returns:
            Which elements were changed, and which were not because of their version.

        Raises:
            RuntimeError: the writer tracks no generations.
            KeyError, ValueError, TypeError: the patch does not fit what is stored.
        """
        if not self.writer.tracks_generations:
            raise RuntimeError(
                f"update_if_present: {self.writer} tracks no generations. Make the buffer with "
                "writer=RoundRobinWriter(track_generations=True)."
            )
        flat = self.storage.flat(index)
        return update_if_present(self.storage, flat, generation, patch, version_key, version, require_newer)

    # Elements ---------------------------------------------------------------------------------

    _storage = property(attrgetter("storage"))  # programs of the field reach for these names
    _sampler = property(attrgetter("sampler"))
    _writer = property(attrgetter("writer"))

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether :meth:`sample` would find something to draw, or, of a buffer that consumes, a full batch."""
        size = batch_size or self.batch_size or 1
        return len(self) >= (size if self.sampler.consumes else 1)

    def __len__(self) -> int:
        self.fillers.raise_error()
        return self.num_held()

    def num_held(self) -> int:
        """Its length, for reports: no error of who fills the buffer is raised."""
        self.storage.ledger.settle()
        if not self.sampler.consumes:
            return len(self.storage)
        with self.drawing, self.storage.ledger.reading():
            return self.sampler.num_left(self.storage)

    @property
    def write_count(self) -> int:
        """Number of elements given so far: those that were overwritten, and those that found no room, included."""
        self.fillers.raise_error()
        return self.num_given()

    def num_given(self) -> int:
        """:attr:`write_count`, for reports: no error of who fills the buffer is raised."""
        self.storage.ledger.settle()
        return self.storage.ledger.write_count * self.storage.columns

    @property
    def initialized(self) -> bool:
        """True: parts are made when the buffer is."""
        return True

    def stats(self) -> dict[str, Any]:
        """Counts of the buffer, which JSON takes.

        Returns:
            ``"size"``, elements that are stored; ``"capacity"``, those that there is room for; ``"utilization"``, the
            one by the other; ``"write_count"``; ``"prefetch_queue_size"``, batches that are prepared or being prepared;
            ``"initialized"``.
        """
        size, capacity = self.num_held(), self.storage.max_size
        return {
            "size": size,
            "write_count": self.num_given(),
            "capacity": capacity,
            "utilization": size / capacity,
            "prefetch_queue_size": self._num_ahead(),
            "initialized": self.initialized,
        }

    def _num_ahead(self) -> int:
        return 0 if self._prefetcher is None else self._prefetcher.num_ahead

    def __getitem__(self, index: Any) -> Any:
        """Elements by place, copied: ``buffer[3]``, ``buffer[:10]``, ``buffer[[1, 4]]``, a mask; ``buffer[:]`` is all.

        The buffer's transforms are applied, as they are to a batch; ``buffer.storage[...]`` is what is stored. With
        ``ndim=2`` the places are those of the batch ``[B, T]`` of all that is stored. A name, or a tuple of names, is
        that entry of all: ``buffer["next", "reward"]``.
        """
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            return entry_of(self[:], index)
        batch = self.storage.get(index, dim=self.dim_extend, collate=self._collated)
        for change in self.transforms:
            batch = applied(change, batch)
        return batch

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace elements; where transforms have inverses, these are applied, as to what is written."""
        given = self._past_inverses(value)
        if given is not None or value is None:
            self.storage.replace(index, given, dim=self.dim_extend)

    def set_at_(self, key: NestedKey, value: Any, index: Any) -> ReplayBuffer:
        """Change an entry of elements, as they are stored; returns the buffer.

        Args:
            key: the entry.
            value: ``[*index, *entry]``, or what broadcasts to that.
            index: as ``sample`` and ``extend`` give it, or a slice of places.

        Raises:
            TypeError: the storage has no rows of tensors.
            KeyError, ValueError, IndexError: the value does not fit, or there is no such entry or element.
        """
        self._set_entries({key: value}, index)
        return self

    def set_(self, key: NestedKey, value: Any) -> ReplayBuffer:
        """Change an entry of all elements, as they are stored; see :meth:`set_at_`."""
        self._set_entries({key: value}, None)
        return self

    def update_(
        self,
        input_dict_or_td: Mapping[NestedKey, Any] | TensorDictBase,
        clone: bool = False,
        *,
        keys_to_update: Sequence[NestedKey] | None = None,
    ) -> ReplayBuffer:
        """Change entries of all elements, as they are stored; returns the buffer.

        Args:
            input_dict_or_td: new values, ``[*all that is stored, *entry]`` each; see :meth:`set_at_`.
            clone: accepted for programs of the field; values are always copied.
            keys_to_update: of those, the entries to change; None: all.
        """
        given = input_dict_or_td
        if keys_to_update is not None:
            given = {key: cast(Any, given)[key] for key in keys_to_update}
        self._set_entries(given, None)
        return self

    def _set_entries(self, data: Mapping[NestedKey, Any] | TensorDictBase, index: Any) -> None:
        set_entries(self.storage, data, index, self.dim_extend)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """The first ``end`` elements by place; None: all. The same as ``buffer[:end]``."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace the first ``end`` elements by place; None: as many as the data are. See :meth:`__setitem__`."""
        self[: len(data) if end is None else end] = data

    def empty(self, empty_write_count: bool = False) -> None:
        """Drop all elements.

        Args:
            empty_write_count: count what is written from 0 again; default: :attr:`write_count` goes on.
        """
        self.drop_prefetched()
        self.storage.clear()
        if empty_write_count:
            self.storage.ledger.reset_write_count()
        if self.insert_limiter is not None:
            self.insert_limiter.begin()

    # Transforms -------------------------------------------------------------------------------

    @property
    def transform(self) -> tuple[Any, ...]:
        """The transforms by place, those of a chain (a ``Compose``) one by one; :meth:`append_transform` adds one."""
        return tuple(part for change in self.transforms for part in parts_of(change))

    def append_transform(self, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """Apply a transform to each batch, after those that are there; returns the buffer.

        Args:
            transform: see :class:`ReplayBuffer`.
            invert: see :meth:`insert_transform`.
        """
        self.insert_transform(len(self.transforms), transform, invert=invert)
        return self

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """Apply a transform before the one at ``index``.

        Args:
            index: from 0 to their number.
            transform: see :class:`ReplayBuffer`.
            invert: apply it to what is written, and its inverse, where it has one, to batches.

        Raises:
            IndexError: ``index`` lies outside the transforms.
        """
        transform = checked_transform(transform)
        inverse_of(transform)  # or an error: it could not be inverted
        transform = Inverted(transform) if invert else transform
        insert(self.transforms, index, transform)
        self.drop_prefetched()
        return self

    def _inverted(self, data: Any) -> Any:
        """Data of a batch as they are stored; None: a transform has left nothing."""
        return self._past_inverses(data)

    def _past_inverses(self, data: Any) -> Any:
        for change in reversed(self.transforms):
            inverse = inverse_of(change)
            data = data if inverse is None or data is None else inverted(inverse, data)
        return data

    # Parts ------------------------------------------------------------------------------------

    def set_sampler(self, sampler: Sampler) -> None:
        """Sample otherwise from now on."""
        chosen = made("sampler", sampler, Sampler, RandomSampler)
        self.drop_prefetched()
        with self.drawing:
            self.sampler = chosen

    def set_writer(self, writer: Writer) -> None:
        """Write otherwise from now on."""
        chosen = made("writer", writer, Writer, RoundRobinWriter)
        chosen.register_storage(self.storage)
        self.writer = chosen

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> None:
        """Put another storage in place.

        Args:
            storage: which, or a callable that makes it.
            collate_fn: of the buffer from now on; None: as it was.
        """
        collate_fn = self.collate_fn if collate_fn is None else collate_fn
        check_given(collate_fn, None, None, None, None, pin_memory=False)
        storage = made("storage", storage, Storage, ListStorage)
        dim = dimension("dim_extend", self._dim_given, storage.ndim)
        self.drop_prefetched()
        with self.drawing:
            self.storage, self.dim_extend, self.collate_fn = storage, dim, collate_fn
            self.writer.register_storage(storage)
        if self.insert_limiter is not None:
            self.insert_limiter.begin()

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw random numbers from ``generator``; None: from torch's global one."""
        self.drop_prefetched()
        self.generator = generator

    def check_shareable(self) -> None:
        """Test that several processes may write.

        Raises:
            ValueError: the writer is not shareable.
        """
        self.writer.check_shareable()

    def share(self, shared: bool = True) -> ReplayBuffer:
        """Let other processes write and sample; returns the buffer.

        What is stored stays, at its places; who holds the buffer (a collector, say) goes on with it. A copy that is
        handed to a process when that is started writes and reads the same rows. May be called again, at any time.

        Args:
            shared: False: do nothing.

        Raises:
            TypeError: the storage holds objects of this process.
            ValueError: the storage is on another device than the CPU, or the writer is not shareable.
            TimeoutError: somebody who writes did not come to an end.
        """
        if shared:
            self.check_shareable()
            self.storage.share()
        return self

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Elements, sampler, writer and generator; ``torch.load(..., weights_only=True)`` reads it.

        Of a buffer that prefetches it is the state after what was drawn: batches that wait to be delivered are not in
        it, and are not drawn again.
        """
        return checkpoint.state_of(self, with_elements=True)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what another buffer held, and sample as it would have.

        Raises:
            KeyError, TypeError: it is the state of something else, or entries are missing; as with whatever else
                raises, nothing was loaded.
            ValueError: it does not fit the buffer's parts.
            RuntimeError: somebody is writing.
        """
        checkpoint.restore([self], [state_dict])

    def dumps(self, path: str | Path) -> None:
        """Write the buffer to a folder, which :meth:`loads` and ``rollwright inspect`` read.

        The folder is replaced as a whole: a kill in the meantime leaves the old one, and so does a full disk.

        Raises:
            OSError: the disk is full; what was written is removed.
        """
        checkpoint.dump(self, path)

    def loads(self, path: str | Path, *, allow_pickle: bool = False) -> None:
        """Read what :meth:`dumps` wrote; where it raises, nothing has changed.

        Args:
            path: the folder.
            allow_pickle: load elements that are objects of any class. That can run any code: only for files that you
                trust. Tensors, TensorDicts, numbers and text need no pickle.

        Raises:
            ValueError: elements are other objects, and ``allow_pickle`` is not set.
            DamagedFileError: a file is cut short, or holds something else.
        """
        checkpoint.restore([self], [checkpoint.read(self, path, allow_pickle=allow_pickle)])

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Change what :meth:`dumps` writes, see :meth:`Storage.register_save_hook`; for this storage alone."""
        self.storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Change back what :meth:`loads` reads, see :meth:`Storage.register_load_hook`; for this storage alone."""
        self.storage.register_load_hook(hook)

    dump = save = dumps
    load = loads

    def client(self, *, address: tuple[str, int] | None = None) -> ReplayBuffer:
        """Of a buffer in a service: the buffer for another process, on any machine. Else this buffer itself.

        Args:
            address: where that process reaches the service, if not where it listens.

        Raises:
            TypeError: there is an address, and the buffer is in memory of this process.
        """
        if address is None:
            return self
        raise TypeError(
            f"address: this {type(self).__name__} is in memory of this process, which nobody reaches from outside. "
            "Make the buffer with service_backend='process' (or 'ray')."
        )

    def start(self) -> ReplayBuffer:
        """Return the buffer: it can be used as soon as it is made, in a service too."""
        return self

    @property
    def is_alive(self) -> bool:
        """Whether the buffer can be used: always, unless it is in a service, which may have ended."""
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        """End the threads that prefetch; of a buffer in a service: end that.

        Args:
            timeout: seconds that a service has for its end; None: 5.
        """
        if self._prefetcher is not None:
            self._prefetcher.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("drawing", "_prefetcher", "fillers"):
            state.pop(name)
        return {**state, "limiter": None, "insert_limiter": None}  # whoever samples here limits it here

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n    storage={self.storage},\n    sampler={self.sampler},\n"
            f"    writer={self.writer},\n    batch_size={self.batch_size},\n)"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows of it: how full it is, and the entries of an element."""
        lines = [f"{len(self):,} elements, {self.write_count:,} written so far", repr(self)]
        if len(self):
            element = self.storage.get(0) if hasattr(self.storage, "get") else None
            if isinstance(element, TensorDictBase):
                lines += ["", "an element", *table_of(entries_of(element))]
        return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _send(buffer: ReplayBuffer) -> Any:
    buffer.check_shareable()  # before the storage is shared
    return buffer.__reduce_ex__(2)


ForkingPickler.register(ReplayBuffer, _send)


def _without_info(batch: Any, info: Mapping[str, Any]) -> Any:
    return batch.exclude(*info) if isinstance(batch, TensorDictBase) else batch


def _num_elements(data: Any, ndim: int) -> int:
    """Elements of a batch, or of a list of batches, of a storage of ``ndim`` dimensions; 0: of anything else."""
    batches = data if isinstance(data, list) else [data]
    if not all(isinstance(batch, TensorDictBase) for batch in batches):
        return 0
    return sum(batch.batch_size[:ndim].numel() for batch in batches)
