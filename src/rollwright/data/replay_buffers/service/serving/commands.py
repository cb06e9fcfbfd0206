"""Commands: what may be asked of the buffer in a replay service."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch

from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.samplers.slices import SliceSampler
from rollwright.data.replay_buffers.service.messages import Info
from rollwright.data.replay_buffers.storages.base import Storage
from rollwright.data.replay_buffers.storages.entries import set_entries


class Commands:
    """Carries out what clients ask; the public methods are what they may ask.

    What is code (transforms, samplers, writers, storages) arrives as a pickle of its own.

    Args:
        buffer: the one of the service.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def info(self) -> Info:
        """On the buffer."""
        buffer, limiter = self._buffer, self._buffer.limiter
        return Info(
            kind=type(buffer).__name__,
            storage=type(buffer.storage).__name__,
            sampler=type(buffer.sampler).__name__,
            max_size=buffer.storage.max_size,
            ndim=buffer.storage.ndim,
            dim_extend=buffer.dim_extend,
            keeps_objects=buffer.storage.keeps_objects,
            draws_slices=isinstance(buffer.sampler, SliceSampler),
            has_priorities=buffer.sampler.has_priorities,
            has_limiter=limiter is not None,
            limiter_timeout_s=60.0 if limiter is None else limiter.timeout_s,
            priority_key=getattr(buffer, "priority_key", None),
            num_transforms=len(buffer.transforms),
        )

    # Writing ------------------------------------------------------------------------------------------

    def extend(self, data: Any, update_priority: bool | None = None) -> torch.Tensor:
        """See :meth:`ReplayBuffer.extend`."""
        return self._buffer.extend(data, update_priority=update_priority)

    def extend_pieces(self, batches: list[Any]) -> torch.Tensor:
        """See :meth:`ReplayBuffer.extend_pieces`."""
        return self._buffer.extend_pieces(batches)

    def add(self, data: Any) -> int | torch.Tensor:
        """See :meth:`ReplayBuffer.add`."""
        return self._buffer.add(data)

    def update_priority(self, index: Any, priority: Any, generation: Any = None) -> None:
        """See :meth:`ReplayBuffer.update_priority`."""
        self._buffer.update_priority(index, priority, generation=generation)

    def mark_update(self, index: Any) -> None:
        """See :meth:`ReplayBuffer.mark_update`."""
        self._buffer.mark_update(index)

    def set_entries(self, data: Any, index: Any) -> None:
        """See :meth:`ReplayBuffer.set_at_`; ``index``: None: of all that is stored."""
        set_entries(self._buffer.storage, data, index, self._buffer.dim_extend)

    def update_if_present(self, arguments: dict[str, Any]) -> Any:
        """See :meth:`ReplayBuffer.update_if_present`."""
        return self._buffer.update_if_present(**arguments)

    def set_elements(self, index: Any, value: Any) -> None:
        """Replace elements."""
        self._buffer[index] = value

    def empty(self, empty_write_count: bool = False) -> None:
        """See :meth:`ReplayBuffer.empty`."""
        self._buffer.empty(empty_write_count)

    # Reading ------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None) -> tuple[Any, dict[str, Any], bool]:
        """A batch, what the sampler returned with it, and whether it ended a pass of the sampler."""
        batch, info = self._buffer.sample(batch_size, return_info=True)
        return batch, info, self._buffer.sampler.ran_out

    def can_sample(self, batch_size: int | None) -> bool:
        """See :meth:`ReplayBuffer.can_sample`."""
        return self._buffer.can_sample(batch_size)

    def get_elements(self, index: Any) -> Any:
        """Elements by place."""
        return self._buffer[index]

    def length(self) -> int:
        """Elements that are there."""
        return len(self._buffer)

    def write_count(self) -> int:
        """Elements that were written so far."""
        return self._buffer.write_count

    def describe(self) -> str:
        """The buffer as text."""
        return repr(self._buffer)

    # Parts --------------------------------------------------------------------------------------------

    def insert_transform(self, index: int, transform: bytes, invert: bool = False) -> None:
        """See :meth:`ReplayBuffer.insert_transform`."""
        self._buffer.insert_transform(index, pickle.loads(transform), invert=invert)

    def set_sampler(self, sampler: bytes) -> Info:
        """See :meth:`ReplayBuffer.set_sampler`."""
        self._buffer.set_sampler(pickle.loads(sampler))
        return self.info()

    def set_writer(self, writer: bytes) -> Info:
        """See :meth:`ReplayBuffer.set_writer`."""
        self._buffer.set_writer(pickle.loads(writer))
        return self.info()

    def set_storage(self, storage: bytes) -> Info:
        """See :meth:`ReplayBuffer.set_storage`; a pair, of the storage and of what collates."""
        given, collate_fn = pickle.loads(storage)
        if isinstance(given, Storage):
            given.move_here()
        self._buffer.set_storage(given, collate_fn)
        return self.info()

    def set_rng(self, state: torch.Tensor | None) -> None:
        """Draw from a generator of this state; None: from torch's global one."""
        self._buffer.set_rng(None if state is None else torch.Generator().set_state(state))

    # State --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`ReplayBuffer.state_dict`."""
        return self._buffer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`ReplayBuffer.load_state_dict`."""
        self._buffer.load_state_dict(state_dict)

    def dumps(self, path: str) -> None:
        """See :meth:`ReplayBuffer.dumps`."""
        self._buffer.dumps(path)

    def loads(self, path: str, allow_pickle: bool) -> None:
        """See :meth:`ReplayBuffer.loads`."""
        self._buffer.loads(path, allow_pickle=allow_pickle)

    # Trajectory ids -----------------------------------------------------------------------------------

    def take_ids(self, count: int) -> int:
        """The first of so many trajectory ids that nobody else has."""
        return self._buffer.storage.ledger.take_ids(count)

    def raise_ids(self, least: int) -> int:
        """Give out no id below ``least``; returns the next one."""
        return self._buffer.storage.ledger.raise_ids(least)

    # The limiter --------------------------------------------------------------------------------------

    def limiter_check(self, frames: int | None, batch_size: int | None) -> None:
        """See :meth:`SampleToInsertRatio.check`."""
        if self._buffer.limiter is not None:
            self._buffer.limiter.check(frames=frames, batch_size=batch_size)

    def limiter_may_insert(self, frames: int) -> bool:
        """See :meth:`SampleToInsertRatio.may_insert`."""
        return self._buffer.limiter is None or self._buffer.limiter.may_insert(frames)

    def limiter_wants(self, frames: int) -> str:
        """See :meth:`SampleToInsertRatio.wants`."""
        return "" if self._buffer.limiter is None else self._buffer.limiter.wants(frames)

    def limiter_stats(self) -> dict[str, Any]:
        """See :meth:`SampleToInsertRatio.stats`."""
        return {} if self._buffer.limiter is None else self._buffer.limiter.stats()
