"""Samplers: which elements of a storage to draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import key_str
from rollwright.data.replay_buffers.storages.batches import positive
from rollwright.data.replay_buffers.storages.saving import Part
from rollwright.data.replay_buffers.storages.storage import Storage

Index = NDArray[np.int64]
GENERATION = "index_generation"
OTHER_SAMPLER = "Load it into a buffer with the sampler that it was saved with, then call set_sampler()."
_TRIES = 3  # to read elements while others write, before these are held off


class Slices(NamedTuple):
    """Positions of the slices of a batch.

    Attributes:
        first: int64 ``[num_slices]``, places in the batch where slices begin.
        last: int64 ``[num_slices]``, places of their last real steps.
        mask: bool ``[n]``: a real step, no padding; None where nothing is padded.
    """

    first: Index
    last: Index
    mask: NDArray[np.bool_] | None = None


class Draw(NamedTuple):
    """The result of a draw.

    Attributes:
        index: int64 ``[n]``, flat elements of the storage.
        info: entries that go with the elements, ``[n]`` each.
        slices: of a sampler of slices.
    """

    index: Index  # type: ignore[assignment]  # hides tuple.index
    info: dict[str, Any]
    slices: Slices | None = None

    def of(self, slices: Slices | None) -> Draw:
        """The same with other slices."""
        return self._replace(slices=slices)


class Sampler(Part):
    """Chooses elements of a storage.

    A subclass defines :meth:`draw`, or :meth:`sample`, which is simpler and has no generator.

    A sampler remembers up to where it has seen the storage and takes in what is new, when it learns that something
    was written and when it draws, so that a draw costs the same however much is stored. It is used by one thread at
    a time.

    Attributes:
        repeatable: whether a draw leaves the sampler as it was, apart from what it took in, so that another can take
            its place. It then draws from a shared storage, and elements are read, while others write: it asks for
            what is stored once (``storage.ledger.span()``) and keeps to that. Where an element is overwritten
            meanwhile, the batch is drawn again. Otherwise writers wait: both happen inside
            ``storage.ledger.reading()``.
        consumes: whether elements that were drawn may not be drawn again; :meth:`num_left` are left.
        ran_out: whether the last draw completed a pass over what was stored, which ends an iteration over the buffer.
        state_entries: names without which a state is none of such a sampler.
    """

    _part = "sampler"
    state_entries: tuple[str, ...] = ()
    repeatable: bool = False
    consumes: bool = False
    ran_out: bool = False

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Any:
            """A sampler, which knows how to draw."""
            if cls.draw is Sampler.draw and cls.sample is Sampler.sample:
                raise TypeError(f"{cls.__name__}: expected a sampler with draw() or sample(), got neither. Define one.")
            return super().__new__(cls)

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose elements; default: by :meth:`sample`.

        Args:
            storage: holds at least one element.
            batch_size: number of elements, at least 1.
            generator: where random numbers come from; None: torch's own.

        Raises:
            IndexError: :meth:`sample` chose an element that is not stored.
        """
        index, info = self.sample(storage, batch_size)
        if storage.ndim == 1:
            flat = storage.elements_at(index[0] if isinstance(index, tuple) else index).reshape(-1)
        else:
            flat = storage.flat(index)
            if not (storage.generations(flat) >= 0).all():
                raise IndexError(f"index: {type(self).__name__}.sample chose elements that are not stored: {index!r}.")
        return Draw(flat, dict(info))

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Choose elements of a storage that no buffer has; a buffer's own ``sample`` reads them, too.

        Args:
            storage: to choose from.
            batch_size: number of elements, at least 1.

        Returns:
            Where they lie, as a buffer's ``sample`` gives it: int64 ``[n]``, or ``[n, ndim]``. And the entries that go
            with them. A subclass returns places, as ``storage[...]`` takes them, of a storage of one dimension; of
            others ``[n, ndim]``, or a tuple of one int64 ``[n]`` for each.

        Raises:
            RuntimeError: nothing is stored.

        Example:
            >>> from rollwright.data import LazyTensorStorage, SamplerWithoutReplacement
            >>> storage = LazyTensorStorage(10)
            >>> storage.set(range(3), torch.arange(3))
            >>> SamplerWithoutReplacement(shuffle=False).sample(storage, 2)
            (tensor([0, 1]), {})
        """
        size = positive("batch_size", batch_size)
        with storage.ledger.reading():
            if not len(storage):
                raise RuntimeError("storage: expected some elements to choose from, got none. Write to it first.")
            draw = self.draw(storage, size)
        return storage.public(draw.index), draw.info

    def extend(self, index: torch.Tensor) -> None:
        """Learn where elements were written; called for each batch that is written to a buffer.

        Args:
            index: int64 ``[n]`` or ``[n, ndim]``.
        """

    def add(self, index: Any) -> None:
        """Learn where one element was written; see :meth:`extend`."""

    def check(self, storage: Storage, data: Any) -> None:
        """Refuse data that could be stored, but not be sampled from; called before a batch is stored.

        Args:
            storage: where the batch would go.
            data: a batch, or several of them.
        """

    def follow(self, storage: Storage) -> None:
        """Take in what was written since the last call."""

    def num_left(self, storage: Storage) -> int:
        """Number of elements that may be drawn; called inside ``storage.ledger.reading()``."""
        return len(storage)

    def mark(self, batch: TensorDictBase, draw: Draw) -> TensorDictBase:
        """Write into a batch what the draw returned for it.

        Args:
            batch: the elements of the draw, ``[n]``, a copy of what is stored; may be changed in place.
            draw: of :meth:`draw`.
        """
        return batch

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Let elements count as new: with the priority of such, for samplers that have priorities.

        Args:
            index: see :meth:`update_priority`.
            storage: see :meth:`update_priority`.
        """

    def update_priority(self, index: Index | torch.Tensor, priority: Any, storage: Storage | None = None) -> None:
        """Learn how much elements matter; ignored where they all matter alike.

        Args:
            index: int64 ``[n]``, flat elements; those below 0 are left out.
            priority: at least 0: ``[n]``, or ``[n, ...]``, or one for all.
            storage: of the elements; None: the one that was drawn from last, and ``index`` is as ``sample`` gives it.
        """

    @property
    def has_priorities(self) -> bool:
        """Whether :meth:`update_priority` changes what is drawn."""
        return type(self).update_priority is not Sampler.update_priority

    def check_state(self, state_dict: Any) -> None:
        """Test that a state is one of such a sampler, before anything is changed.

        Raises:
            TypeError: it is no state.
            KeyError, ValueError: it is that of another sampler.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict: expected the state of a {type(self).__name__}, a dictionary, got "
                f"{type(state_dict).__name__}. Pass what state_dict() gave."
            )
        missing = [name for name in self.state_entries if name not in state_dict]
        if missing:
            raise KeyError(f"{self._other_state()}: {key_str(missing)} missing. {OTHER_SAMPLER}")

    def _other_state(self) -> str:
        return f"state_dict: expected the state of a {type(self).__name__}, got that of another sampler"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def draw_and_read(
    storage: Storage,
    sampler: Sampler,
    size: int,
    generator: torch.Generator | None,
    buffer: str,
    generations: bool = False,
) -> tuple[Draw, Any]:
    """Draw elements, and read them; of a shared storage while others write, if that goes well.

    Args:
        storage: of the elements.
        sampler: draws them.
        size: how many.
        generator: of random numbers; None: torch's global one.
        buffer: what is sampled, for messages.
        generations: add ``"index_generation"`` to ``info``, see :meth:`Storage.generations`.

    Raises:
        RuntimeError: nothing is stored.
        TimeoutError: all that was stored is being overwritten, for too long, by other threads or processes.
    """
    if storage.shared and sampler.repeatable:
        for _ in range(_TRIES):
            found = _read_beside_writers(storage, sampler, size, generator, generations)
            if found is not None:
                return found
    while True:
        error: Exception | None = None
        with storage.ledger.reading():
            if len(storage):
                try:
                    draw = sampler.draw(storage, size, generator)
                except ValueError as found:  # too little is left while the rest is being overwritten, perhaps
                    if not storage.ledger.is_overwriting:
                        raise
                    error = found
                else:
                    return draw, _read(storage, draw, generations)
        if not storage.ledger.await_overwritten():
            raise error or RuntimeError(
                f"{buffer} is empty: nothing to sample from yet. Call extend(), or wait until "
                "what writes into it has written."
            )


def mark_rest(sampler: Sampler, draw: Draw, batch: TensorDictBase, kept: torch.Tensor) -> TensorDictBase:
    """Mark where stretches of the slices of a batch begin and end that has lost some of its steps.

    Args:
        sampler: of the batch.
        draw: the batch as it was drawn.
        batch: the steps that are left, ``[n]``, at least one.
        kept: int64 ``[n]``, their places in the batch as it was.
    """
    if draw.slices is None:
        return batch
    behind = np.flatnonzero(np.diff(kept.numpy(force=True)) != 1)
    slices = Slices(np.append(0, behind + 1), np.append(behind, len(kept) - 1))
    return sampler.mark(batch, draw.of(slices))


def _read_beside_writers(
    storage: Storage, sampler: Sampler, size: int, generator: torch.Generator | None, generations: bool
) -> tuple[Draw, Any] | None:
    """Draw elements and read them without holding anyone off; None: a writer prevented it.

    A process that the system suspends inside a lock keeps all writers waiting until it runs again.
    """
    span = storage.ledger.steady_span()
    if span is None or not len(storage):
        return None
    try:
        draw = sampler.draw(storage, size, generator)
        data = _read(storage, draw, generations)
    except Exception:  # of what changed meanwhile, or what it will raise once more where nothing changes
        return None
    return (draw, data) if storage.ledger.still_holds(span, draw.index, storage.columns) else None


def _read(storage: Storage, draw: Draw, generations: bool) -> Any:
    if generations:
        draw.info[GENERATION] = torch.from_numpy(storage.generations(draw.index))
    return storage.read(draw.index)
