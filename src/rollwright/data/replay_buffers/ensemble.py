"""ReplayBufferEnsemble: several buffers, sampled as one, each written by its own source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._foreign import class_path
from rollwright._keys import NestedKey, as_keys, key_str, leaf_keys
from rollwright._tensors import as_tensor
from rollwright.data.loading import load_saved, save
from rollwright.data.replay_buffers import checkpoint
from rollwright.data.replay_buffers._arguments import (
    Transform,
    check_given,
    check_names,
    checked_transform,
    insert,
    inverse_of,
    parts_of,
    size_of_batch,
    stacked,
)
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.limiter import Counts, SampleToInsertRatio
from rollwright.data.replay_buffers.storages.batches import positive

_LIMITER_FILE, _MEMBERS_FILE = "limiter.pt", "members.pt"


class ReplayBufferEnsemble:
    """Samples from several buffers at once.

    A batch is ``[members, n]``: one row for each buffer that was drawn, of its own sampler, collation and transforms.
    Rows of different lengths (of slices cut short) are stacked lazily.

    Each member is written by a source of its own: ``extend(data, member=i)`` writes to member i, and a collector
    that is worker i does. With ``routing_key`` or ``routing_dim``, ``extend(data)`` finds out by itself.

    Args:
        *buffers: the members.
        transform: applied to the stacked batch.
        batch_size: elements in a batch, over all rows.
        collate_fn: makes a batch of the list of rows; default: stacks them.
        p: weights of members, at least 0; default: all alike.
        sample_from_all: draw each member once, instead of by ``p``.
        num_buffer_sampled: rows of a batch that are drawn by ``p``; default: as many as there are members.
        routing_key: entry of the data, int64 ``[n]``: the member that an element goes to.
        routing_dim: dimension of the data, as long as there are members: its n-th part goes to member n.
        generator: where random numbers come from, those of members included; default: each member's own.
        shared: see :class:`ReplayBuffer`; applied to all members.
        limiter: see :class:`ReplayBuffer`; one for all members, which have none of their own.

    Raises:
        ValueError: options contradict one another.

    Example:
        >>> from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> members = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
        >>> ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=6)
        >>> for worker in range(2):
        ...     _ = ensemble.extend(TensorDict({"worker": torch.full((4,), worker)}, [4]), member=worker)
        >>> ensemble.sample()["worker"]
        tensor([[0, 0, 0],
                [1, 1, 1]])
    """

    def __init__(
        self,
        *buffers: ReplayBuffer,
        transform: Transform | None = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        p: Sequence[float] | torch.Tensor | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        routing_key: NestedKey | None = None,
        routing_dim: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        limiter: SampleToInsertRatio | None = None,
    ) -> None:
        strangers = [class_path(buffer) for buffer in buffers if not isinstance(buffer, ReplayBuffer)]
        if not buffers or strangers:
            raise TypeError(
                f"buffers: expected replay buffers of rollwright.data, got {', '.join(strangers) or 'none'}. Pass one "
                "for each source."
            )
        if any(hasattr(buffer, "as_writer") for buffer in buffers):
            raise TypeError(
                "buffers: expected buffers in memory of this machine, got one in a service, which draws by itself. "
                "Sample from it alone, or make it without service_backend."
            )
        if sample_from_all and (p is not None or num_buffer_sampled is not None):
            raise ValueError("sample_from_all draws every member once, and excludes p and num_buffer_sampled.")
        if routing_key is not None and routing_dim is not None:
            raise ValueError("routing_key and routing_dim were both given. Pass one of them.")
        check_given(collate_fn, None, None, generator, limiter, pin_memory=False)
        self.members = list(buffers)
        self.transforms: list[Transform] = []
        if transform is not None:
            self.append_transform(transform)
        self.batch_size = None if batch_size is None else positive("batch_size", batch_size)
        self.collate_fn, self.sample_from_all = collate_fn, sample_from_all
        self.p = None if p is None else self._weights(p)
        rows = len(buffers) if num_buffer_sampled is None else positive("num_buffer_sampled", num_buffer_sampled)
        self.num_buffer_sampled = rows
        self.routing_key = None if routing_key is None else as_keys(routing_key)[0]
        self.routing_dim = routing_dim
        self.generator: torch.Generator | None = None
        if generator is not None:
            self.set_rng(generator)
        if self.batch_size is not None:
            self._row_size(self.batch_size)
        self.limiter = self.insert_limiter = limiter
        if limiter is not None:
            self._limit(limiter)
        self.share(shared)

    def _limit(self, limiter: SampleToInsertRatio) -> None:
        members = self.members
        if any(member.insert_limiter is not None for member in members):
            raise ValueError("limiter: expected members without one of their own. Give it to the ensemble alone.")
        drawn = self._drawable()
        limiter.bind(
            Counts(
                write_count=self.num_given,
                num_stored=lambda: sum(len(member.storage) for member in members),
                can_draw=lambda: all(len(member.storage) for member in drawn),
                is_shared=lambda: any(member.storage.shared for member in members),
                max_size=sum(member.storage.max_size for member in members),
            ),
            self.batch_size,
        )
        for member in members:
            member.insert_limiter = limiter

    def _drawable(self) -> list[ReplayBuffer]:
        """The members that may be drawn."""
        weights = [1.0] * len(self.members) if self.p is None else self.p.tolist()
        return [member for member, p in zip(self.members, weights, strict=True) if p]

    def _weights(self, p: Sequence[float] | torch.Tensor) -> torch.Tensor:
        weights = as_tensor(p, dtype=torch.float64)
        if weights.shape != (len(self.members),) or bool((weights < 0).any()) or not bool(weights.sum() > 0):
            raise ValueError(
                f"p: expected {len(self.members)} weights of at least 0, not all of them 0, got {weights.tolist()}."
            )
        return weights

    def _row_size(self, batch_size: int) -> int:
        if batch_size % self.num_buffer_sampled:
            raise ValueError(
                f"batch_size: expected a multiple of {self.num_buffer_sampled}, the number of members drawn, got "
                f"{batch_size}."
            )
        return batch_size // self.num_buffer_sampled

    # Writing ----------------------------------------------------------------------------------

    def extend(self, data: Any, *, member: int | None = None, update_priority: bool | None = None) -> torch.Tensor:
        """Store a batch in a member, or parts of it in several.

        Args:
            data: see :meth:`ReplayBuffer.extend`.
            member: where to; None: by ``routing_key`` or ``routing_dim``.
            update_priority: see :meth:`ReplayBuffer.extend`.

        Returns:
            Where elements lie in their members: as of :meth:`ReplayBuffer.extend`; of several members one after the
            other in order of members.

        Raises:
            ValueError: nothing determines the member.
        """
        options = {"update_priority": update_priority}
        if member is not None:
            return self._member(member).extend(data, **options)
        if self.routing_dim is not None:
            parts = data.unbind(self.routing_dim)
            if len(parts) != len(self.members):
                raise ValueError(
                    f"data: expected {len(self.members)} parts along routing_dim={self.routing_dim}, got {len(parts)}."
                )
            return torch.cat([buffer.extend(part, **options) for buffer, part in zip(self.members, parts, strict=True)])
        if self.routing_key is None:
            raise self._unrouted("extend")
        data = stacked(data) if isinstance(data, list) else data
        if not isinstance(data, TensorDictBase):
            raise TypeError(
                f"routing_key: expected a TensorDict, or a list of some, with the entry {self.routing_key!r}, got "
                f"{type(data).__name__}. Pass extend(data, member=i)."
            )
        rows = data.reshape(-1)
        where = rows.get(self.routing_key, None)
        if where is None:
            raise KeyError(
                f"routing_key: the data have no entry {self.routing_key!r}; they have {key_str(leaf_keys(rows))}. "
                "Name one of these, or pass extend(data, member=i)."
            )
        where = where.reshape(len(rows), -1)[:, 0]
        if where.is_floating_point():
            raise TypeError(f"{self.routing_key!r}: expected integers, numbers of members, got {where.dtype}.")
        if not bool(((where >= 0) & (where < len(self.members))).all()):
            raise ValueError(f"{self.routing_key!r}: expected members 0 to {len(self.members) - 1}, got {where}.")
        written = [(buffer, rows[where == n]) for n, buffer in enumerate(self.members)]
        return torch.cat([buffer.extend(part, **options) for buffer, part in written if len(part)])

    def add(self, data: Any, *, member: int | None = None) -> int | torch.Tensor:
        """Store one element in a member: the one that is named, or the one of its ``routing_key``."""
        if member is None and self.routing_key is not None:
            found = self.extend([data])
            return int(found[0]) if found.ndim == 1 and len(found) == 1 else found
        if member is None:
            raise self._unrouted("add")
        return self._member(member).add(data)

    def _unrouted(self, call: str) -> ValueError:
        return ValueError(
            f"member: the ensemble cannot tell which member the data belong to. Pass {call}(data, member=i), or give "
            "it a routing_key or, for extend(), a routing_dim."
        )

    def _member(self, n: int) -> ReplayBuffer:
        if not 0 <= n < len(self.members):
            raise IndexError(f"member: expected 0 to {len(self.members) - 1}, got {n}. Add members, or name another.")
        return self.members[n]

    # Sampling ---------------------------------------------------------------------------------

    @overload
    def sample(self, batch_size: int | None = None, *, return_info: Literal[True]) -> tuple[Any, dict[str, Any]]: ...
    @overload
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any: ...
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A batch ``[members, n]``; see :meth:`ReplayBuffer.sample`.

        Where elements are TensorDicts, ``"index"`` holds ``"buffer_ids"`` and ``"index"``.
        """
        size = size_of_batch(batch_size, self.batch_size)
        for member in self.members:
            member.fillers.raise_error()
        row_size = self._row_size(size)
        if self.limiter is None:
            batch, info = self._sampled(row_size)
        else:
            batch, info = self.limiter.draw(
                size, lambda: self._sampled(row_size), lambda drawn: sum(len(index) for index in drawn[1]["index"])
            )
        return (batch, info) if return_info else batch

    def _sampled(self, row_size: int) -> tuple[Any, dict[str, Any]]:
        drawn = self._drawn()
        rows, infos = zip(*(self.members[n].sample(row_size, return_info=True) for n in drawn), strict=True)
        for n, row, info in zip(drawn, rows, infos, strict=True):
            index = info["index"]
            if isinstance(row, TensorDictBase):
                if len(row) != len(index):  # a transform has left elements out
                    index = row.get("index", None)
                if index is not None:
                    check_names("sample", row, ["index"])
                    place = _places(n, index)
                    row.set("index", place.reshape(-1, *(1,) * (row.ndim - 1)).expand(row.batch_size))
            info["index"] = _places(n, info["index"])
        batch = _stack(list(rows)) if self.collate_fn is None else self.collate_fn(list(rows))
        for change in self.transforms:
            batch = change(batch)
        return batch, {"index": _stack([info["index"] for info in infos]), "members": drawn}

    def _drawn(self) -> list[int]:
        count = len(self.members)
        if self.sample_from_all:
            return list(range(count))
        if self.p is None:
            drawn = torch.randint(count, (self.num_buffer_sampled,), generator=self.generator, device="cpu")
        else:
            drawn = torch.multinomial(self.p, self.num_buffer_sampled, replacement=True, generator=self.generator)
        return [int(n) for n in drawn]

    def update_priority(self, index: TensorDictBase, priority: Any) -> None:
        """Set the priorities of elements of members.

        Args:
            index: ``"buffer_ids"`` and ``"index"``, as batches hold them.
            priority: at least 0: one for each element, or a number for all. Of rows of different lengths, those of all
                elements one after the other, or a list of those of each row.

        Raises:
            ValueError: priorities of another number than elements.
        """
        rows = index.tensordicts if isinstance(index, LazyStackedTensorDict) else [index]
        ids = torch.cat([row.get("buffer_ids").reshape(-1) for row in rows])
        places = torch.cat([row.get("index").flatten(0, row.ndim - 1) for row in rows])
        is_listed = isinstance(priority, list | tuple) and all(isinstance(row, torch.Tensor) for row in priority)
        each = torch.cat([row.reshape(-1) for row in priority]) if is_listed else as_tensor(priority)
        if each.numel() != 1 and each.numel() % max(len(ids), 1):
            raise ValueError(
                f"priority: expected one for each of the {len(ids)} elements, got shape {list(each.shape)}. Pass the "
                "elements' index along with it."
            )
        each = (each.reshape(1).expand(len(ids)) if each.numel() == 1 else each).reshape(len(ids), -1)
        for n, buffer in enumerate(self.members):
            mine = ids == n
            if bool(mine.any()):
                buffer.update_priority(places[mine], each[mine.to(each.device)])

    def next(self) -> Any:
        """A batch: what :meth:`sample` gives."""
        return self.sample()

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.sample()

    # Members ----------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Member ``index``; an ensemble of some members; with a tuple, elements of members.

        ``ensemble[0]`` is a member, ``ensemble[1:]`` or ``ensemble[[0, 2]]`` an ensemble, which samples these members
        by their weights and is written member by member; ``ensemble[0, :10]`` and ``ensemble[:, 3]`` are elements.
        """
        if not isinstance(index, tuple):
            return self.members[index] if _is_one(index) else self._some(self._numbers(index))
        inside = index[1] if len(index) == 2 else index[1:]
        if _is_one(index[0]):
            return self.members[index[0]][inside]
        return _stack([self.members[n][inside] for n in self._numbers(index[0])])

    def _numbers(self, index: Any) -> list[int]:
        """The members that a slice, a list, an array or a tensor names."""
        if isinstance(index, slice):
            return list(range(len(self.members)))[index]
        numbers: list[int] = np.arange(len(self.members))[np.asarray(index)].reshape(-1).tolist()
        return numbers

    def _some(self, numbers: list[int]) -> ReplayBufferEnsemble:
        if numbers == list(range(len(self.members))):
            return self
        some = ReplayBufferEnsemble(
            *(self.members[n] for n in numbers),
            collate_fn=self.collate_fn,
            p=None if self.p is None else self.p[numbers],
            sample_from_all=self.sample_from_all,
            num_buffer_sampled=None if self.sample_from_all else self.num_buffer_sampled,
        )
        some.batch_size, some.transforms, some.generator = self.batch_size, self.transforms, self.generator
        return some

    def __len__(self) -> int:
        """Number of members; elements are ``sum(len(member) for member in ensemble.members)``."""
        return len(self.members)

    @property
    def write_count(self) -> int:
        """Number of elements given so far, over all members; see :attr:`ReplayBuffer.write_count`."""
        return sum(member.write_count for member in self.members)

    def num_given(self) -> int:
        """:attr:`write_count`, for reports: raises no error of a collector that fills the buffer."""
        return sum(member.num_given() for member in self.members)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether all members that may be drawn can be sampled; see :meth:`ReplayBuffer.can_sample`."""
        size = batch_size or self.batch_size
        row_size = None if size is None else self._row_size(size)
        return all(member.can_sample(row_size) for member in self._drawable())

    def stats(self) -> dict[str, Any]:
        """Counts of all members together, and their number, ``"num_buffers"``; see :meth:`ReplayBuffer.stats`."""
        each = [member.stats() for member in self.members]
        summed = {name: sum(of[name] for of in each) for name in each[0] if name not in ("utilization", "initialized")}
        of_all = {"utilization": summed["size"] / summed["capacity"], "initialized": True}
        return {**summed, **of_all, "num_buffers": len(each)}

    def shutdown(self, timeout: float | None = None) -> None:
        """End the threads of members that prefetch; see :meth:`ReplayBuffer.shutdown`."""
        for member in self.members:
            member.shutdown(timeout)

    @property
    def transform(self) -> tuple[Any, ...]:
        """The transforms by place; see :attr:`ReplayBuffer.transform`. Those of members are their own."""
        return tuple(part for change in self.transforms for part in parts_of(change))

    def append_transform(self, transform: Transform) -> ReplayBufferEnsemble:
        """Apply a transform to each stacked batch, after those that are there."""
        return self.insert_transform(len(self.transforms), transform)

    def insert_transform(self, index: int, transform: Transform) -> ReplayBufferEnsemble:
        """Apply a transform to each stacked batch, before the one at ``index``.

        Raises:
            IndexError: ``index`` lies outside the transforms.
            TypeError: the transform has an inverse.
        """
        transform = checked_transform(transform)
        if inverse_of(transform) is not None:
            raise TypeError(
                f"transform: {type(transform).__name__} has an inverse, which an ensemble does not apply to what is "
                "written. Give the transform to each member."
            )
        insert(self.transforms, index, transform)
        return self

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw random numbers from ``generator``, those of members included; None: from torch's global one."""
        self.generator = generator
        for member in self.members:
            member.set_rng(generator)

    def check_shareable(self) -> None:
        """Test whether all members can be shared with other processes."""
        for member in self.members:
            member.check_shareable()

    def share(self, shared: bool = True) -> ReplayBufferEnsemble:
        """Move all members to memory that processes share."""
        for member in self.members:
            member.share(shared)
        return self

    def empty(self, empty_write_count: bool = False) -> None:
        """Drop all elements of all members; see :meth:`ReplayBuffer.empty`."""
        for member in self.members:
            member.empty(empty_write_count)

    def state_dict(self) -> dict[str, Any]:
        """Those of the members, by index, and that of the limiter, where there is one."""
        states: dict[str, Any] = {str(n): member.state_dict() for n, member in enumerate(self.members)}
        return states if self.limiter is None else {**states, "limiter": self.limiter.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what another ensemble of as many members held; where it raises, no member has changed.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: see :meth:`ReplayBuffer.load_state_dict`.
        """
        names = [str(n) for n in range(len(self.members))]
        if not isinstance(state_dict, Mapping) or state_dict.keys() - {"limiter"} != set(names):
            got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise KeyError(f"state_dict: expected {len(names)} members, got {got}.")
        self._restore([state_dict[name] for name in names], state_dict.get("limiter"))

    def _restore(self, states: Sequence[Any], counts: Any) -> None:
        if self.limiter is not None:
            self.limiter.check_state(counts)
        checkpoint.restore(self.members, states)
        if self.limiter is not None:
            self.limiter.load_state_dict(counts)

    def dumps(self, path: str | Path) -> None:
        """Write each member to a folder of its own inside ``path``."""
        for n, member in enumerate(self.members):
            member.dumps(Path(path) / str(n))
        save({"members": len(self.members)}, Path(path) / _MEMBERS_FILE)  # an older dump may have had others
        if self.limiter is not None:
            save(self.limiter.state_dict(), Path(path) / _LIMITER_FILE)

    def loads(self, path: str | Path, *, allow_pickle: bool = False) -> None:
        """Read what :meth:`dumps` wrote; see :meth:`ReplayBuffer.loads`.

        Raises:
            ValueError: it was an ensemble of more or fewer members.
        """
        saved = _num_saved(Path(path).expanduser())
        if saved not in (0, len(self.members)):
            raise ValueError(
                f"path: expected a dump of {len(self.members)} members, got one of {saved} in {str(path)!r}. Make the "
                "ensemble with as many."
            )
        folder = Path(path).expanduser()
        states = [
            checkpoint.read(member, folder / str(n), allow_pickle=allow_pickle) for n, member in enumerate(self.members)
        ]
        counts = load_saved(folder / _LIMITER_FILE) if (folder / _LIMITER_FILE).is_file() else None
        self._restore(states, counts)

    dump = save = dumps
    load = loads

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "limiter": None, "insert_limiter": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.members)} members, batch_size={self.batch_size})"


def _num_saved(folder: Path) -> int:
    """Members of the ensemble whose dump is in a folder; 0: there is none."""
    file = folder / _MEMBERS_FILE
    if file.is_file():
        return int(load_saved(file)["members"])
    n = 0
    while (folder / str(n)).is_dir():
        n += 1
    return n


def _is_one(index: Any) -> bool:
    return not isinstance(index, slice) and np.ndim(index) == 0


def _places(member: int, index: torch.Tensor) -> TensorDict:
    """Indices of elements of a member, and whose they are."""
    return TensorDict({"buffer_ids": torch.full((len(index),), member, device="cpu"), "index": index}, [len(index)])


def _stack(rows: list[Any]) -> Any:
    if all(isinstance(row, TensorDictBase) for row in rows):
        return LazyStackedTensorDict.maybe_dense_stack(rows, 0)
    return torch.stack(rows) if all(isinstance(row, torch.Tensor) for row in rows) else rows
