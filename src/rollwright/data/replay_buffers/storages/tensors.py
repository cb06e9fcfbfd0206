"""Storages of tensors: in memory, and in files that survive the process."""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from rollwright._keys import leaf_keys
from rollwright._warnings import warn_user
from rollwright.data.replay_buffers.storages.batches import is_a_class, is_structure, packed
from rollwright.data.replay_buffers.storages.memory import LOCK_FILE, ROWS_FILE, STATE_FILE, PrivateMemory, SharedMemory
from rollwright.data.replay_buffers.storages.rows import RowStorage
from rollwright.data.replay_buffers.storages.saving import recover
from rollwright.data.specs.shapes import as_device, usable_device


class LazyTensorStorage(RowStorage):
    """Keeps rows of tensors in memory, which is allocated with the first element.

    Args:
        max_size: number of elements.
        device: device of the rows.
        ndim: number of dimensions of the data that count elements. 1: elements are one after the other. 2: a batch
            ``[B, T]`` is stored as it is; each ``extend`` adds T steps to each of the B environments.
        compilable, consolidated, cleanup_memmap: no effect, for programs that were written for TorchRL.
        shared_init: let other processes write and sample from the start, whichever writes the first element; the same
            as ``shared=True`` of the buffer.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
        >>> _ = buffer.extend(TensorDict({"obs": torch.arange(10.0)}, [10]))
        >>> buffer.sample().batch_size, buffer[2:4]["obs"]
        (torch.Size([4]), tensor([2., 3.]))
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str | int = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        shared_init: bool = False,
        consolidated: bool = False,
        cleanup_memmap: bool = True,
    ) -> None:
        place_ = usable_device("device", device) or torch.device("cpu")
        super().__init__(max_size, PrivateMemory(place_), ndim, place_)
        if self.ndim == 1:
            self.ledger.set_capacity(self.requested_size)
        if shared_init:
            self.share()


class TensorStorage(RowStorage):
    """Rows that hold given data from the start.

    Args:
        storage: a TensorDict, a tensor, or a dictionary, tuple or tensorclass of tensors; copied. A TensorDict without
            entries is room for as many elements, none of which is there yet.
        max_size: number of elements; None: as many as are given.
        device: where rows lie; None: the CPU.
        ndim, compilable: see :class:`LazyTensorStorage`.

    Example:
        >>> from tensordict import TensorDict
        >>> storage = TensorStorage(TensorDict({"obs": torch.arange(3)}, [3]))
        >>> len(storage)
        3
    """

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str | int = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        batch: Any = storage
        if is_a_class(storage) or (is_structure(storage) and not isinstance(storage, list)):
            batch = packed(storage, ndim)[0]
        if not isinstance(batch, TensorDictBase | torch.Tensor) or batch.ndim < ndim:
            raise TypeError(
                f"storage: expected a TensorDict or a tensor of {ndim} dimensions, got {type(storage).__name__}."
            )
        place_ = usable_device("device", device) or torch.device("cpu")
        elements = batch.shape[:ndim].numel()
        super().__init__(elements if max_size is None else max_size, PrivateMemory(place_), ndim, place_)
        if self.ndim == 1:
            self.ledger.set_capacity(self.requested_size)
        if not isinstance(batch, TensorDictBase) or leaf_keys(batch):
            self.append(storage, dim=ndim - 1)


class LazyMemmapStorage(RowStorage):
    """Keeps rows in a file that is mapped into memory: they may be larger than memory, and survive a restart.

    Published rows survive a kill at any moment (a power failure only after :meth:`flush`). If you open the storage
    again, it has the published rows. Rows that a killed process was writing are dropped, with a warning that counts
    them. So are rows that were overwritten while the folder was copied.

    Args:
        max_size: number of elements; None: that of the existing files.
        scratch_dir: folder of the files; None: a file without a name in the system's temporary folder, which is gone
            with the process.
        ndim: see :class:`LazyTensorStorage`.
        existsok: continue with the rows in ``scratch_dir``, if there are any.
        device: the CPU.
        compilable, shared_init: see :class:`LazyTensorStorage`.
        auto_cleanup: remove the files when this process ends, unless it is killed; default: keep them.

    Attributes:
        num_reopened: number of elements that existed when the storage was made.

    Raises:
        FileExistsError: the folder has rows, and ``existsok`` is False.
        DamagedFileError: the file is cut short, its counters contradict each other, or it was copied while rows were
            replaced. It stays as it is.
        OSError: the disk is full. Space is allocated shortly before rows are written, so ``extend`` raises this, too.

    Example:
        >>> import tempfile
        >>> from tensordict import TensorDict
        >>> folder = tempfile.mkdtemp()
        >>> _ = LazyMemmapStorage(100, scratch_dir=folder).append(TensorDict({"obs": torch.arange(3)}, [3]))
        >>> LazyMemmapStorage(100, scratch_dir=folder, existsok=True).num_reopened
        3
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        scratch_dir: str | Path | None = None,
        ndim: int = 1,
        existsok: bool = False,
        device: torch.device | str | int = "cpu",
        compilable: bool = False,
        shared_init: bool = False,
        auto_cleanup: bool | None = None,
    ) -> None:
        if as_device(device) != torch.device("cpu"):
            raise ValueError(f"device: expected 'cpu' for rows in a file, got {device!r}. Use LazyTensorStorage.")
        folder = None if scratch_dir is None else Path(scratch_dir).expanduser().resolve()
        if folder is not None:
            recover(folder)
            if (folder / ROWS_FILE).exists() and not existsok:
                raise FileExistsError(
                    f"scratch_dir: {str(folder)!r} holds the rows of a buffer. Pass existsok=True to go on with them, "
                    "or name another folder."
                )
        memory = _mapped(folder)
        schema = memory.schema()
        if max_size is None:
            if schema is None:
                raise ValueError(f"max_size: expected a number of elements, got None, and {folder} holds no rows yet.")
            max_size, ndim = schema.max_size, schema.ndim
        super().__init__(max_size, memory, ndim, torch.device("cpu"))
        if self.ndim == 1 and schema is None:
            self.ledger.set_capacity(self.requested_size)
        dropped, overwritten = memory.num_dropped, memory.num_overwritten
        self.num_reopened = len(self) if self.initialized else 0
        if shared_init:
            self.share()
        if auto_cleanup and folder is not None:
            atexit.register(_clean_up, folder, os.getpid())
        if dropped:
            warn_user(
                f"scratch_dir: {folder} holds {self.num_reopened} published elements; {dropped} rows that a killed "
                "process was writing are dropped.",
            )
        if overwritten:
            warn_user(
                f"scratch_dir: {folder} is a copy that was made while somebody wrote: {overwritten} rows were "
                f"overwritten meanwhile and are dropped, {self.num_reopened} elements are whole. dumps() copies all.",
            )

    @property
    def scratch_dir(self) -> Path | None:
        """The folder of the files."""
        return cast(SharedMemory, self._memory).folder

    @property
    def _filename(self) -> str | None:
        folder = self.scratch_dir
        return None if folder is None else str(folder / ROWS_FILE)

    def cleanup(self) -> bool:
        """Remove the files from the disk, and their folder, if it holds nothing else.

        Whoever has opened them goes on with their rows, which are gone once nobody has.

        Returns:
            Whether there was something to remove.
        """
        folder = self.scratch_dir
        return folder is not None and _clean_up(folder, os.getpid())

    def flush(self) -> None:
        """Wait until the disk has everything."""
        cast(SharedMemory, self._memory).flush()


def _clean_up(folder: Path, pid: int) -> bool:
    """Remove the files of a storage; only in the process that was to do it, not in a child that was forked there."""
    if os.getpid() != pid or not (folder / ROWS_FILE).exists():
        return False
    for name in (ROWS_FILE, LOCK_FILE, STATE_FILE):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds other files
        folder.rmdir()
    return True


def _mapped(folder: Path | None) -> SharedMemory:
    """Memory in a file; where there is no space for a new one, what was made of it is removed."""
    if folder is None or (folder / ROWS_FILE).exists():
        return SharedMemory(folder, on_disk=True)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return SharedMemory(folder, on_disk=True)
    except OSError:
        for name in (ROWS_FILE, LOCK_FILE):
            (folder / name).unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise
