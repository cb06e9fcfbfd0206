"""Replay buffers of TensorDicts, and prioritised ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys
from rollwright._options import with_options
from rollwright.data.replay_buffers._arguments import check_names, priorities_in, with_info
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.samplers.prioritized import WEIGHT, PrioritizedSampler, Reduction
from rollwright.data.replay_buffers.samplers.sampler import GENERATION
from rollwright.data.replay_buffers.storages.batches import is_a_class, is_structure
from rollwright.data.replay_buffers.storages.storage import ListStorage, Storage

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.keywords import BufferKeywords, CommonBufferKeywords


@with_options(ReplayBuffer)
class TensorDictReplayBuffer(ReplayBuffer):
    """Stores TensorDicts; batches have the indices of their elements.

    A batch has the entry ``"index"`` (int64 ``[n]``, or ``[n, ndim]``), and others that the sampler returns
    (``"priority_weight"``). So your data must not have entries of these names. If data that you write have
    ``priority_key``, that is their first priority.

    Args:
        priority_key: the entry that :meth:`update_tensordict_priority` reads.
        **options: those of :class:`ReplayBuffer`.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=3)
        >>> _ = buffer.extend(TensorDict({"obs": torch.zeros(1, 4)}, [1]))
        >>> buffer.sample()["index"]
        tensor([0, 0, 0])
    """

    def __init__(self, *, priority_key: NestedKey = "td_error", **options: Unpack[BufferKeywords]) -> None:
        self.priority_key = as_keys(priority_key)[0]
        super().__init__(**options)

    if TYPE_CHECKING:  # batches of TensorDicts are TensorDicts

        @overload  # type: ignore[override]  # in the order of the one it overrides, with one more
        def sample(
            self, batch_size: int | None = None, *, return_info: Literal[True], include_info: bool | None = None
        ) -> tuple[TensorDictBase, dict[str, Any]]: ...
        @overload
        def sample(
            self, batch_size: int | None = None, return_info: Literal[False] = False, include_info: bool | None = None
        ) -> TensorDictBase: ...
        @overload
        def sample(
            self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None
        ) -> Any: ...
        def sample(
            self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None
        ) -> Any:
            """See :meth:`ReplayBuffer.sample`."""

        def __iter__(self) -> Iterator[TensorDictBase]: ...

    def _inverted(self, data: Any) -> Any:
        items = () if isinstance(data, TensorDictBase) else data if isinstance(data, list) else (data,)
        for item in items:
            if is_a_class(item) or is_structure(item):
                raise TypeError(
                    f"data: {type(self).__name__} writes the index of elements into its batches, and expected a "
                    f"TensorDict or tensor, or a list of TensorDicts, got {type(item).__name__}. Use a ReplayBuffer, "
                    "which returns elements as they were given, and sample(return_info=True) for their index."
                )
        return super()._inverted(data)

    def _with_info(self, batch: TensorDictBase, info: Mapping[str, Any]) -> TensorDictBase:
        included: TensorDictBase = with_info(batch, info)
        return included

    def _indices(self, data: Any, index: np.ndarray[Any, Any], prioritise: bool = True) -> torch.Tensor:
        if prioritise and isinstance(self.sampler, PrioritizedSampler):
            self._prioritise(data, index)
        return super()._indices(data, index)

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names of the entries that batches have in addition to stored ones."""
        weight = (WEIGHT,) if isinstance(self.sampler, PrioritizedSampler) else ()
        return ("index", *weight, *((GENERATION,) if self.writer.tracks_generations else ()))

    def _check_new(self, data: Any, each: int, prioritise: bool = True) -> None:
        check_names("data", data, self.own_names)
        sampler = self.sampler
        if not prioritise or not each or not isinstance(sampler, PrioritizedSampler):
            return
        first = self._first_priorities(data, 0)
        if first is not None and first.numel() and not first.numel() % each:
            sampler.check_priorities(first.reshape(each, -1), each)

    def _first_priorities(self, data: Any, dim: int) -> torch.Tensor | None:
        """The priorities that data bring along, flat, in the order of elements that lie along ``dim``."""
        given = [piece.get(self.priority_key, None) for piece in (data if isinstance(data, list) else [data])]
        if any(priority is None for priority in given):
            return None
        return torch.cat([p.movedim(dim, 0).reshape(-1) if dim else p.reshape(-1) for p in given])

    def _prioritise(self, data: Any, index: np.ndarray[Any, Any]) -> None:
        dim = self.dim_extend if index.size > self.storage.columns else 0  # one row has one order
        flat = self._first_priorities(data, dim)
        stored = index >= 0
        if flat is not None and stored.size and flat.numel() and not flat.numel() % stored.size:
            each = flat.reshape(stored.size, -1)  # of several, the sampler makes one
            self.update_priority(self.storage.public(index[stored]), each[torch.from_numpy(stored)])

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set priorities from a batch of :meth:`sample`, to which ``priority_key`` was written.

        Nothing is done where the sampler has no priorities. Where the batch has ``"index_generation"`` (a writer with
        ``track_generations=True`` gives it), elements that were overwritten since they were drawn are left out.

        Raises:
            KeyError: the batch has no such entry, or no ``"index"``.
        """
        if self.sampler.has_priorities:
            self.update_priority(**priorities_in(data, self.priority_key))


def _prioritized(options: CommonBufferKeywords, alpha: float, beta: float, *more: Any) -> dict[str, Any]:
    """Options with the sampler and the storage that a prioritised buffer has; ``more``: arguments of the sampler."""
    storage = options.get("storage")
    storage = ListStorage(1000) if storage is None else storage  # an empty one is false
    storage = storage() if not isinstance(storage, Storage) and callable(storage) else storage
    sampler = PrioritizedSampler(storage.max_size, alpha, beta, *more)
    return {**options, "storage": storage, "sampler": sampler}


@with_options(ReplayBuffer, leave_out=["sampler"])
class PrioritizedReplayBuffer(ReplayBuffer):
    """Samples elements by priority: a :class:`ReplayBuffer` with a :class:`PrioritizedSampler`.

    Args:
        alpha: exponent of priorities.
        beta: exponent of importance weights.
        eps: added to each priority.
        dtype: dtype of the weights.
        reduction: how several priorities of an element become one.
        sync, sampler_device: no effect, for programs that were written for TorchRL. The sampler reads what other
            processes have written when it draws. Priorities are in memory of the CPU.
        **options: those of :class:`ReplayBuffer`, except ``sampler``.

    Example:
        >>> from rollwright.data import LazyTensorStorage
        >>> buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(10), batch_size=2)
        >>> index = buffer.extend(torch.arange(3.0))
        >>> buffer.update_priority(index, torch.tensor([0.0, 0.0, 1.0]))
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        sync: bool = True,
        sampler_device: torch.device | str | None = None,
        **options: Unpack[CommonBufferKeywords],
    ) -> None:
        super().__init__(**_prioritized(options, alpha, beta, eps, dtype, reduction))


@with_options(ReplayBuffer, leave_out=["sampler"])
class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """Samples TensorDicts by priority: a :class:`TensorDictReplayBuffer` with a :class:`PrioritizedSampler`.

    Args:
        alpha: exponent of priorities.
        beta: exponent of importance weights.
        eps: added to each priority.
        dtype: dtype of the weights.
        reduction: how several priorities of an element become one.
        priority_key: the entry that :meth:`update_tensordict_priority` reads.
        sync, sampler_device: no effect, for programs that were written for TorchRL. The sampler reads what other
            processes have written when it draws. Priorities are in memory of the CPU.
        **options: those of :class:`ReplayBuffer`, except ``sampler``.

    Example:
        >>> from rollwright.data import LazyTensorStorage
        >>> TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(10)).priority_key
        'td_error'
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        priority_key: NestedKey = "td_error",
        sync: bool = True,
        sampler_device: torch.device | str | None = None,
        **options: Unpack[CommonBufferKeywords],
    ) -> None:
        super().__init__(priority_key=priority_key, **_prioritized(options, alpha, beta, eps, dtype, reduction))
