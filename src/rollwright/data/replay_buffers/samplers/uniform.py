"""Samplers of single elements, all alike: at random, each once in a pass, or each so often and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._options import with_options
from rollwright.data.replay_buffers.samplers.sampler import OTHER_SAMPLER, Draw, Index, Sampler
from rollwright.data.replay_buffers.storages.batches import positive
from rollwright.data.replay_buffers.storages.storage import Storage


def nth_live(rank: Index, low: int, gaps: Index) -> Index:
    """Positions of the live rows of these ranks, oldest first.

    >>> nth_live(np.arange(4), 10, np.array([[11, 13], [14, 15]]))
    array([10, 13, 15, 16])
    """
    if not len(gaps):
        return rank + low
    gone = np.append(0, np.cumsum(gaps[:, 1] - gaps[:, 0]))
    first_after = gaps[:, 0] - low - gone[:-1]  # rank of the first live row after each gap
    position: Index = rank + low + gone[first_after.searchsorted(rank, "right")]
    return position


def _drawn(low: int, high: int, n: int, generator: torch.Generator | None) -> Index:
    drawn: Index = torch.randint(low, high, (n,), generator=generator, device="cpu").numpy()
    return drawn


@with_options()
class RandomSampler(Sampler):
    """Every element that is stored, with the same probability, and with replacement.

    Args:
        replacement: False makes a :class:`SamplerWithoutReplacement`.
        drop_last, shuffle: of that one.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=RandomSampler(), batch_size=32)
        >>> _ = buffer.extend(TensorDict({"obs": torch.arange(10)}, [10]))
        >>> buffer.sample().batch_size
        torch.Size([32])
    """

    repeatable = True

    def __init__(self, *, replacement: bool = True, drop_last: bool = False, shuffle: bool = True) -> None:
        if drop_last or not shuffle:
            raise ValueError(
                "drop_last, shuffle: expected them for a sampler without replacement, whose passes they shape. Pass "
                "replacement=False, or leave them out."
            )

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, replacement: bool = True, **options: Any) -> Any:
            """A sampler with replacement, or one without."""
            if replacement:
                return super().__new__(cls)
            if cls is not RandomSampler:
                raise TypeError(f"replacement: no {cls.__name__} draws without replacement. Leave it out.")
            return SamplerWithoutReplacement(**options)

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose elements at random, all with the same probability."""
        low, high, _ = span = storage.ledger.span()
        gaps, columns = storage.ledger.gaps(span), storage.columns
        if not len(gaps):
            drawn = _drawn(low * columns, high * columns, batch_size, generator)
            drawn %= storage.capacity * columns
            return Draw(drawn, {})
        drawn = _drawn(0, storage.ledger.num_live(span) * columns, batch_size, generator)
        rank, column = np.divmod(drawn, columns)
        return Draw(nth_live(rank, low, gaps) % storage.capacity * columns + column, {})


class Epoch:
    """A pass over items, each at most once; items that have died since it began are left out.

    Args:
        items: int64 ``[m, n]``, an item a column, in the order of the pass.
    """

    def __init__(self, items: Index) -> None:
        self._ahead, self._next = items, 0
        self._ready = items[:, :0]  # looked at and found alive

    def holds(self, count: int, alive: Callable[[Index], NDArray[np.bool_]]) -> bool:
        """Whether at least ``count`` items are left.

        Args:
            count: how many.
            alive: for items ``[m, k]``, which live: bool ``[k]``; the dead stay dead.
        """
        self._ready = self._ready[:, alive(self._ready)]
        while self._ready.shape[1] < count and self._next < self._ahead.shape[1]:
            seen = self._ahead[:, self._next : self._next + max(count, 64)]
            self._next += seen.shape[1]
            self._ready = np.concatenate([self._ready, seen[:, alive(seen)]], 1)
        return bool(self._ready.shape[1] >= count)

    def take(self, count: int, alive: Callable[[Index], NDArray[np.bool_]]) -> Index:
        """The next ``count`` items that live, or all that are left."""
        self.holds(count, alive)
        taken, self._ready = self._ready[:, :count], self._ready[:, count:]
        return taken

    def keep(self, chosen: Callable[[Index], NDArray[np.bool_]]) -> None:
        """Leave out those of the items ``[m, k]`` that are left and not chosen: bool ``[k]``."""
        left = self.left
        self._ahead, self._next = left[:, chosen(left)], 0
        self._ready = self._ahead[:, :0]

    @property
    def left(self) -> Index:
        """All items that are left, some of which may be dead."""
        return np.concatenate([self._ready, self._ahead[:, self._next :]], 1)


class Passes:
    """Takes batches out of one pass after the other.

    Args:
        drop_last: leave out the last batch of a pass where it is short.
        shuffle: each pass in an order of its own; else in the order of items.
        items: what they are called in messages.
    """

    def __init__(self, drop_last: bool, shuffle: bool, items: str = "elements") -> None:
        self.drop_last, self.shuffle, self._name = drop_last, shuffle, items
        self.epoch: Epoch | None = None
        self.ran_out = False

    def take(
        self,
        count: int,
        items: Callable[[], Index],
        alive: Callable[[Index], NDArray[np.bool_]],
        generator: torch.Generator | None,
    ) -> Index:
        """The next batch.

        Args:
            count: size of a batch.
            items: all items of a new pass, int64 ``[m, n]``.
            alive: see :class:`Epoch`.
            generator: of the order.

        Raises:
            ValueError: there are fewer items than one batch, and short ones are left out.
        """
        needed = count if self.drop_last else 1
        if self.epoch is None or not self.epoch.holds(needed, alive):
            every = items()
            if self.shuffle:
                every = every[:, torch.randperm(every.shape[1], generator=generator, device="cpu").numpy()]
            self.epoch = Epoch(every)
            if not self.epoch.holds(needed, alive):
                raise ValueError(
                    f"batch_size: expected at most the {every.shape[1]} {self._name} that are stored, as "
                    f"drop_last=True leaves out batches that are not full; got {count}. Ask for fewer, store more, or "
                    "pass drop_last=False."
                )
        taken = self.epoch.take(count, alive)
        self.ran_out = not self.epoch.holds(needed, alive)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """What is left of the pass, and whether it ended with the last batch."""
        left = None if self.epoch is None else torch.from_numpy(self.epoch.left)
        return {"left": left, "ran_out": self.ran_out}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""
        left, ran_out = state_dict["left"], bool(state_dict["ran_out"])
        self.epoch = None if left is None else Epoch(left.numpy(force=True).astype(np.int64))
        self.ran_out = ran_out


class InPasses(Sampler):
    """A sampler that draws everything once before it draws anything again."""

    repeatable = False
    state_entries = ("left", "ran_out")

    _passes: Passes
    _item_size = 1  # numbers that name an item

    @property
    def drop_last(self) -> bool:
        """Whether short batches are left out."""
        return self._passes.drop_last

    @property
    def shuffle(self) -> bool:
        """Whether each pass has an order of its own."""
        return self._passes.shuffle

    @property
    def ran_out(self) -> bool:
        """Whether the last draw completed a pass."""
        return self._passes.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._passes.ran_out = bool(value)

    def state_dict(self) -> dict[str, Any]:
        """What is left of the pass."""
        return self._passes.state_dict()

    def check_state(self, state_dict: Any) -> None:
        """Test that a state is one of such a sampler, before anything is changed."""
        super().check_state(state_dict)
        left = state_dict["left"]
        if left is not None and len(left) != self._item_size:
            raise ValueError(f"{self._other_state()}, which draws something else without replacement. {OTHER_SAMPLER}")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the pass of a state of :meth:`state_dict`."""
        self.check_state(state_dict)
        self._passes.load_state_dict(state_dict)


class SamplerWithoutReplacement(InPasses):
    """Every element once, then every element again.

    A pass goes over what is stored when it begins; elements that are overwritten in the meantime are left out, new
    ones wait for the next pass. Its last batch may be short.

    Args:
        drop_last: leave out the last batch of a pass where it is short.
        shuffle: in an order drawn for each pass; else oldest first.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = SamplerWithoutReplacement(shuffle=False)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = buffer.extend(TensorDict({"obs": torch.arange(6)}, [6]))
        >>> buffer.sample()["obs"], sampler.ran_out
        (tensor([0, 1, 2, 3]), False)
        >>> buffer.sample()["obs"], sampler.ran_out
        (tensor([4, 5]), True)
    """

    def __init__(self, drop_last: bool = False, shuffle: bool = True) -> None:
        self._passes = Passes(drop_last, shuffle)

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose elements; ``[n]`` with n below ``batch_size`` at the end of a pass.

        Raises:
            ValueError: fewer elements than ``batch_size`` are stored, and ``drop_last`` is set.
        """
        (low, high), gaps, columns = storage.ledger.live(), storage.ledger.gaps(), storage.columns

        def items() -> Index:  # an element's name while it lives: position * columns + column
            num_live = storage.ledger.num_live()
            if not len(gaps):
                return np.arange(low * columns, high * columns)[None]
            positions = nth_live(np.arange(num_live), low, gaps)
            return (positions[:, None] * columns + np.arange(columns)).reshape(1, -1)

        def alive(items: Index) -> NDArray[np.bool_]:
            lives: NDArray[np.bool_] = (items[0] >= low * columns) & (items[0] < high * columns)
            if len(gaps):  # of a buffer that was loaded in the middle of a pass
                gap = gaps[:, 0].searchsorted(items[0] // columns, "right") - 1
                lives &= (gap < 0) | (items[0] // columns >= gaps[gap, 1])
            return lives

        drawn = self._passes.take(batch_size, items, alive, generator)[0]
        return Draw(drawn % (storage.capacity * columns), {})

    def __repr__(self) -> str:
        return f"SamplerWithoutReplacement(drop_last={self.drop_last}, shuffle={self.shuffle})"


class ConsumingSampler(Sampler):
    """Every element that is stored, with the same probability, until it was drawn so often.

    An element is at most once in a batch. A batch is short where fewer elements are left than it asks for;
    ``len(buffer)`` is their number, and iterating over the buffer ends when none is left. What was consumed can be read
    by place until it is overwritten. The oldest element is overwritten first, whether it was consumed or not.

    Args:
        max_sample_count: how often an element may be drawn.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> _ = buffer.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> len(buffer.sample()), len(buffer), len(buffer.sample()), len(buffer)
        (3, 1, 1, 0)
    """

    repeatable = False
    consumes = True
    state_entries = ("names", "drawn", "high")

    def __init__(self, max_sample_count: int = 1) -> None:
        self.max_sample_count = positive("max_sample_count", max_sample_count)
        self._names: Index = np.zeros(0, np.int64)  # of the elements that are left: position * columns + column
        self._drawn: Index = np.zeros(0, np.int64)  # how often each was drawn
        self._high = 0  # positions taken in
        self.ran_out = False
        self._storage: Storage | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage": None}

    def follow(self, storage: Storage) -> None:
        """Read what was written since the last call."""
        (low, high), columns = storage.ledger.live(), storage.columns
        if high < self._high or (self._storage is not None and storage is not self._storage):
            self._names, self._drawn, self._high = self._names[:0], self._drawn[:0], 0
        self._storage = storage
        if len(self._names) and self._names.min() < low * columns:
            held = self._names >= low * columns
            self._names, self._drawn = self._names[held], self._drawn[held]
        if high > self._high:
            positions = storage.ledger.positions()
            fresh = positions[positions >= self._high]
            names = (fresh[:, None] * columns + np.arange(columns)).reshape(-1)
            self._names = np.concatenate([self._names, names])
            self._drawn = np.concatenate([self._drawn, np.zeros(len(names), np.int64)])
            self._high = high

    def num_left(self, storage: Storage) -> int:
        """Number of elements that were drawn less often than allowed; call it inside ``storage.ledger.reading()``."""
        self.follow(storage)
        return len(self._names)

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose elements; ``[n]`` with n below ``batch_size`` where fewer are left.

        Raises:
            RuntimeError: none is left.
        """
        self.follow(storage)
        if not len(self._names):
            raise RuntimeError(
                f"every element was drawn {self.max_sample_count} times: nothing is left to sample. Call extend(), or "
                "wait until what writes into the buffer has written."
            )
        chosen = torch.randperm(len(self._names), generator=generator, device="cpu")[:batch_size].numpy()
        names = self._names[chosen]
        self._drawn[chosen] += 1
        left = self._drawn < self.max_sample_count
        self._names, self._drawn = self._names[left], self._drawn[left]
        self.ran_out = not len(self._names)
        return Draw(names % (storage.capacity * storage.columns), {})

    def state_dict(self) -> dict[str, Any]:
        """Which elements are left, and how often they were drawn."""
        names, drawn = torch.from_numpy(self._names.copy()), torch.from_numpy(self._drawn.copy())
        return {"names": names, "drawn": drawn, "high": self._high}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""
        self.check_state(state_dict)
        names = state_dict["names"].numpy(force=True).astype(np.int64)
        drawn = state_dict["drawn"].numpy(force=True).astype(np.int64)
        self._names, self._drawn, self._high = names, drawn, int(state_dict["high"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_sample_count={self.max_sample_count})"
