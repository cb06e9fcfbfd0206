"""StorageMemory: collects batches directly into rows of a replay buffer's storage, where possible."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey, leaf_keys
from rollwright._memory import EntryMemory, MemoryPool
from rollwright.collectors.delivery_options import buffer_of
from rollwright.collectors.options import CollectorOptions


def batch_memory(options: CollectorOptions) -> MemoryPool:
    """Where the batches of a collector lie: in the rows of its replay buffer if that takes whole rollouts."""
    stored = options.replay_buffer is not None and options.extend_buffer and not options.delivers_whole
    return StorageMemory(options) if stored else MemoryPool()


def why_not_direct(buffer: Any) -> str | None:
    """Why the rows of a buffer cannot be written in place; None: they can."""
    if not hasattr(buffer, "direct_writes"):
        return f"{type(buffer).__name__} has no rows to write in place"
    reason: str | None = buffer.direct_writes()
    return reason


class StorageMemory(MemoryPool):
    """Gives reserved rows of a storage for the batch that is being collected, else memory of its own.

    A batch lies in the rows as if :meth:`extend` had put it there: ``[*env, T]`` in one row after another for a
    storage of one dimension, else time by time. Nobody reads the rows until :meth:`publish`, nor rows that others
    reserve after them: so they are reserved only while the caller iterates, over a buffer of this process alone.

    Args:
        options: of the collector, with a ``replay_buffer``.

    Attributes:
        how: what is done, and why; for ``stats()``.
        num_direct: batches that lay in the storage.
        num_copied: batches that were copied into it.
    """

    def __init__(self, options: CollectorOptions) -> None:
        super().__init__()
        self._buffer = buffer_of(options)
        self._storage: Any = getattr(self._buffer, "storage", None)
        self._why_never = _never_direct(options)
        self._reason = self._why_never or why_not_direct(self._buffer)
        self._open = False
        self._reservation: Any = None
        self._windows: dict[NestedKey, torch.Tensor] = {}
        self.num_direct = self.num_copied = 0

    @property
    def how(self) -> str:
        """What is done with a batch, and why."""
        return "direct: frames are written into the storage's rows" if not self._reason else f"extend: {self._reason}"

    @contextmanager
    def batch(self, *, keeps_batches: bool, in_background: bool) -> Iterator[None]:
        """Collect a batch in the ``with`` block; what was reserved and not published at its end is released.

        Args:
            keeps_batches: whether someone is given the batch, who may keep it longer than the rows hold it.
            in_background: whether a thread collects, and others use the buffer meanwhile.
        """
        self._begin(keeps_batches, in_background)
        try:
            yield
        finally:
            self._open = False
            self._abandon()

    def _begin(self, keeps_batches: bool, in_background: bool) -> None:
        self._reason = self._why_never or why_not_direct(self._buffer)
        if not self._reason:
            if keeps_batches:
                self._reason = "post_collect_hook may keep the batch"
            elif in_background:
                self._reason = "a thread collects, and what others write meanwhile is not held back"
            elif getattr(self._storage, "shared", False):
                self._reason = "the buffer is shared, and what other processes write is not held back"
        self._open = not self._reason

    def _abandon(self) -> None:
        """Give back what is reserved and not published."""
        self._windows = {}
        if self._reservation is not None:
            self._storage.abandon(self._reservation)
            self._reservation = None

    def reserve(self, fields: Mapping[NestedKey, Any], env: tuple[int, ...], steps: int) -> None:
        """Reserve rows for a batch.

        Args:
            fields: shape, dtype and device of each entry of a frame ``[*env]``.
            env: the environment's batch size.
            steps: T.
        """
        storage = self._storage
        if not self._open or self._reservation is not None:
            return
        flat = storage.ndim == 1
        if not flat and storage.ndim != len(env) + 1:
            self._reason = f"a batch has {len(env) + 1} dimensions, the storage {storage.ndim}"
            return
        try:
            forms = {key: (tuple(field.shape[len(env) :]), field.dtype) for key, field in fields.items()}
            schema = storage.settle(forms, () if flat else env)
        except (KeyError, ValueError):  # extend() reports it again, to the user
            self._reason = "the frames are not those of the storage"
            return
        env_size = torch.Size(env).numel()
        rows = steps * env_size if flat else steps
        end = storage.ledger.live()[1]
        if any(field.device.type != "cpu" for field in fields.values()):
            self._reason = "frames do not lie on the CPU"
        elif rows > storage.capacity:
            self._reason = "a batch is larger than the storage"
        elif end % storage.capacity + rows > storage.capacity:
            self._reason = None  # this batch alone goes around the ring's seam
        else:
            self._reservation = reservation = storage.reserve(rows)
            if not storage.holds(schema):  # another writer has begun with other entries; extend() reports it
                self._abandon()
                return
            for key in fields:
                window = storage.window(reservation, key)
                if window is None:  # another writer was faster
                    self._abandon()
                    return
                self._windows[key] = window.unflatten(0, (*env, steps)) if flat else window.movedim(0, len(env))

    def take(self, place: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> EntryMemory:
        """Memory that nothing reads, allocated where there is none; slabs of another shape or dtype are dropped."""
        window = self._windows.get(place)  # type: ignore[call-overload]
        return EntryMemory.over(window) if window is not None else super().take(place, shape, dtype)

    def publish(self, batch: TensorDictBase, steps: int) -> TensorDictBase | None:
        """Let everyone read the batch, if it lies in the rows.

        Args:
            batch: ``[*env, T]``, as it was collected.
            steps: those of the T that were taken.

        Returns:
            None if it lies there; else what is to be stored, in other memory, and nothing is reserved any more.
        """
        whole = steps == batch.batch_size[-1]
        batch = batch if whole else batch[..., :steps]
        if self._reservation is None or not whole or not self._holds(batch):
            if self._reservation is not None:
                if whole:  # what was reserved in vain is lost: do not try again
                    self._why_never = "batches do not lie where frames are written"
                batch = batch.clone()  # the rows given up may be the next to be written
                self._abandon()
            self.num_copied += 1
            return batch
        self._storage.publish(self._reservation)
        self._reservation, self._windows = None, {}
        self.num_direct += 1
        self._buffer.written()
        return None

    def _holds(self, batch: TensorDictBase) -> bool:
        """Whether the batch is what lies in the windows: it may have been stacked or moved."""
        if isinstance(batch, LazyStackedTensorDict):  # of frames whose shapes vary
            return False
        if len(leaf_keys(batch)) != len(self._windows):
            return False
        held = [batch.get(key, None) for key in self._windows]
        return all(
            value is not None and value.data_ptr() == window.data_ptr() and value.shape == window.shape
            for value, window in zip(held, self._windows.values(), strict=True)
        )


def _never_direct(options: CollectorOptions) -> str | None:
    """What stands against writes in place for good."""
    if options.postproc is not None:
        return "postproc comes first"
    if options.interruptor is not None:
        return "an interrupted rollout would leave rows unused"
    device = options.storing_device or options.device
    if device is not None and torch.device(device).type != "cpu":
        return f"batches lie on {device}"
    return None
