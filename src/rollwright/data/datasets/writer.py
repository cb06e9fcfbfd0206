"""DatasetWriter: appends a collector's batches to a dataset on disk."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import gymnasium
import tensordict
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

import rollwright
from rollwright._keys import NestedKey, as_tuple, leaves, unravel
from rollwright._warnings import warn_user
from rollwright.data.datasets.description import (
    COMPACT,
    DESCRIPTION,
    FRAMES,
    RAGGED_VERSION,
    ROWS,
    FrameFiles,
    check_target,
    copy_bytes,
    remove_dataset,
    remove_frames,
    write_all,
    write_description,
)
from rollwright.data.datasets.episodes import EpisodeScan, FrameColumns, Totals

_LAYOUT = (
    "A memory-mapped TensorDict in the folder 'data', time last. Each environment's frames lie in order of time; "
    "trajectories are told apart by collector.traj_ids and end where next.done is true. Only the first 'steps' "
    "steps are data. Read it with rollwright.data.datasets.load_dataset."
)
_RAGGED_LAYOUT = (
    "Frames in the folder 'data', each encoded by itself, step by step; trajectories are told apart by "
    "collector.traj_ids and end where next.done is true. Read it with rollwright.data.datasets.load_dataset."
)

Leaves = dict[NestedKey, torch.Tensor]
Layout = dict[NestedKey, tuple[torch.Size, torch.dtype]]


class DatasetWriter:
    """Writes a collector's batches to disk as one long batch. Memory use does not grow with the frames.

    Frames of one layout are written to a memory-mapped TensorDict. Where the first batch has text, objects, or entries
    whose shapes or keys differ between frames, all frames are written as
    :class:`~rollwright.data.RaggedStorage` keeps them, with a checksum each.

    Args:
        path: folder to write to, made where needed.
        steps: the most steps that each environment will take; disk space is taken as it is used.
        source: what the frames come from, for the description; anything that JSON knows.
        overwrite: replace a dataset at ``path``, with the first batch. Other files are never deleted.
        leave_out_objects: do not store text and other objects that are no tensors, and note their names in the
            description.

    Attributes:
        steps: steps of each environment that are written.
        frames: frames that are written.
        left_out: entries that are no tensors, which are not stored (``leave_out_objects``).

    Raises:
        FileExistsError: ``path`` is a file, or a folder that is not empty.

    Example:
        >>> import tempfile
        >>> from rollwright.collectors import Collector
        >>> from rollwright.data.datasets import describe_dataset, load_dataset
        >>> from rollwright.envs import GymEnv
        >>> folder = tempfile.TemporaryDirectory()
        >>> collector = Collector(GymEnv("CartPole-v1", num_envs=2), frames_per_batch=40, total_frames=120)
        >>> with collector, DatasetWriter(folder.name, steps=60, source={"env": "CartPole-v1"}) as writer:
        ...     for batch in collector:
        ...         writer.write(batch)
        >>> load_dataset(folder.name)["next", "reward"].shape
        torch.Size([2, 60, 1])
        >>> describe_dataset(folder.name)["complete"]
        True
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        steps: int,
        source: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        leave_out_objects: bool = False,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps: expected at least 1, got {steps}.")
        self.path = Path(path)
        self.steps = 0
        self.left_out: list[NestedKey] = []
        self._leaves_out_objects = leave_out_objects
        self._requested_steps = self._allocated_steps = steps
        self._source = dict(source or {})
        self._created = _now()
        self._data = FRAMES
        self._layout: Layout = {}
        self._env_shape = torch.Size(())
        self._files: dict[NestedKey, BinaryIO] = {}
        self._rows: FrameFiles | None = None  # of frames of which each has a layout of its own
        self._names: dict[NestedKey, str] = {}
        self._scan, self._totals = EpisodeScan(), Totals()
        self._closed = False
        self._made_folder = not self.path.exists()
        check_target(self.path, overwrite=overwrite)
        self._replaces = (self.path / DESCRIPTION).exists()
        if not self._replaces:
            self.path.mkdir(parents=True, exist_ok=True)
            self._describe(complete=False)

    @property
    def frames(self) -> int:
        """Frames that are written."""
        return self.steps * self._env_shape.numel() if self.steps else 0

    @property
    def episodes(self) -> dict[str, Any]:
        """Counts of episodes, with the mean and range of returns and lengths, as in the description."""
        return {**self._totals.summary(), "unfinished": self._scan.unfinished}

    def write(self, batch: TensorDictBase, steps: int | None = None) -> None:
        """Append a batch.

        Args:
            batch: ``[*env, T]``, with the layout of the first one.
            steps: how many of its steps to take, from the front; None for all.

        Raises:
            ValueError: the batch has another layout, or more steps than are left.
            TypeError: an entry is an object of a kind that cannot be kept; it is named.
            OSError: the disk is full or failing; what was written before stays.
        """
        steps = batch.batch_size[-1] if steps is None else steps
        if self._closed:
            raise ValueError("This writer is closed. Make a new one.")
        if steps > self._allocated_steps - self.steps:
            raise ValueError(
                f"batch: expected at most {self._allocated_steps - self.steps} more steps, got {steps}. Make the "
                "writer with a larger steps=."
            )
        batch = batch[..., :steps]
        batch, leaves = self._parts(batch)
        if self._rows is not None or (leaves is None and not self._files):
            self._write_ragged(batch)
        else:
            self._write_dense(batch, leaves)
        self._count(batch)
        self.steps += steps
        self._describe(complete=False)

    def close(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Finish the dataset and give back disk space that was not used. May be called again.

        A writer that never got a batch leaves nothing behind.

        Args:
            interrupted: asked while data are copied to give back space: True stops that, which loses nothing.
        """
        if self._closed:
            return
        self._closed = True
        for file in self._files.values():
            os.fsync(file.fileno())
            file.close()
        if self._rows is not None:
            self._rows.close()
            self._allocated_steps = self.steps
        if not self.steps:
            if not self._replaces:
                remove_dataset(self.path)
            if self._made_folder and not any(self.path.iterdir()):
                self.path.rmdir()
            return
        if self.steps < self._allocated_steps:
            self._compact(interrupted)
        self._describe(complete=self.steps == self._requested_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Frames -----------------------------------------------------------------------------------

    def _parts(self, batch: TensorDictBase) -> tuple[TensorDictBase, Leaves | None]:
        """A batch less what is left out, and its tensors; None: its frames are ragged, or hold objects."""
        try:
            keys = [leaves(part) for part in _unstacked(batch)]
        except RuntimeError:  # parts of it are ragged
            keys = [leaves(frame) for frame in batch.reshape(-1).unbind(0)]
        objects = list({key: None for found in keys for key in found if not isinstance(found[key], torch.Tensor)})
        if objects and self._leaves_out_objects:
            self.left_out += [unravel(key) for key in objects if unravel(key) not in self.left_out]
            batch = batch.exclude(*objects)
            keys, objects = [{key: found[key] for key in found if key not in objects} for found in keys], []
        if objects or any(found.keys() != keys[0].keys() for found in keys):
            return batch, None
        try:
            return batch, {key: batch.get(key) for key in keys[0]}
        except RuntimeError:  # of different shapes
            return batch, None

    def _write_ragged(self, batch: TensorDictBase) -> None:
        """Write frames of which each has a layout of its own."""
        if self._rows is None:
            self._replace()
            self._env_shape, self._data = batch.batch_size[:-1], ROWS
            self._rows = FrameFiles(self.path / ROWS)
        self._check_env(batch)
        self._rows.write(batch)

    def _write_dense(self, batch: TensorDictBase, found: Leaves | None) -> None:
        """Write frames of one layout."""
        if found is None:
            raise ValueError(
                "batch: its frames differ in keys or shapes, or hold text or other objects, and those of the first "
                "batch did not. Write it to a dataset of its own, pad such entries, or leave them out."
            )
        if not self._files:
            self._allocate(batch, found)
        self._check(batch, found)
        for key, value in found.items():
            self._write_rows(key, value)

    def _replace(self) -> None:
        """Remove what was there, only now that there is something to replace it with."""
        if self._replaces:
            remove_dataset(self.path)
            self._replaces = False

    def _allocate(self, batch: TensorDictBase, found: Leaves) -> None:
        """Make the files, which the system gives space as they are written."""
        self._replace()
        self._env_shape = batch.batch_size[:-1]
        self._layout = _layout_of(batch, found)
        num_bytes = sum(map(self._frame_bytes, found)) * self._env_shape.numel() * self._allocated_steps
        free = shutil.disk_usage(self.path).free
        if num_bytes > free:
            warn_user(
                f"The dataset will take {num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free at {self.path}. "
                "Ask for fewer frames, or write elsewhere.",
            )
        self._names = self._make_files(self._data, self._allocated_steps)
        self._files = {
            key: open(self.path / self._data / name, "r+b", buffering=0)  # noqa: SIM115 - kept open
            for key, name in self._names.items()
        }

    def _make_files(self, folder: str, steps: int) -> dict[NestedKey, str]:
        """Make sparse files of a memory-mapped TensorDict ``[*env, steps]``, in tensordict's own format.

        Returns:
            Their names in the folder, by entry. Entries of no bytes have none.
        """
        frame = TensorDict({}, [*self._env_shape, 1])
        for key, (shape, dtype) in self._layout.items():
            frame.set(key, torch.zeros((*self._env_shape, 1, *shape), dtype=dtype))
        frame.names = [*[None] * len(self._env_shape), "time"]
        try:
            mapped: Any = frame.expand(*self._env_shape, steps).memmap_like(str(self.path / folder))
        except (RuntimeError, OSError) as error:
            raise OSError(f"cannot make files for {steps:,} steps in {self.path / folder}: {error}") from error
        files = {key: mapped.get(key).filename for key in self._layout if self._frame_bytes(key)}
        return {key: Path(os.path.relpath(file, self.path / folder)).as_posix() for key, file in files.items()}

    def _check_env(self, batch: TensorDictBase) -> None:
        if batch.batch_size[:-1] != self._env_shape:
            raise ValueError(
                f"batch: expected environments {list(self._env_shape)}, as in the first batch, got "
                f"{list(batch.batch_size[:-1])}. Write it to a dataset of its own."
            )

    def _check(self, batch: TensorDictBase, found: Leaves) -> None:
        self._check_env(batch)
        layout = _layout_of(batch, found)
        for key in {**self._layout, **layout}:
            expected, got = self._layout.get(key), layout.get(key)
            if expected != got:
                raise ValueError(
                    f"batch: {key!r} was {_brief(expected)} in the first batch and is now {_brief(got)}. A dataset has "
                    "one layout: give the entry one shape and dtype."
                )

    def _frame_bytes(self, key: NestedKey) -> int:
        shape, dtype = self._layout[key]
        return shape.numel() * dtype.itemsize

    def _write_rows(self, key: NestedKey, value: torch.Tensor) -> None:
        """Write each environment's steps behind those it has.

        Through the file, not through the memory map: a full disk is then an ``OSError`` instead of a
        killed process, and pages written do not count as this process's memory.
        """
        size, num_rows = self._frame_bytes(key), self._env_shape.numel()
        if not size:
            return
        rows = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).reshape(num_rows, -1).numpy()
        for row, data in enumerate(rows):
            write_all(self._files[key], (row * self._allocated_steps + self.steps) * size, memoryview(data))

    def _compact(self, interrupted: Callable[[], bool]) -> None:
        """Copy the complete steps into files of their size; the old ones hold until that is done."""
        try:
            for key, name in self._make_files(COMPACT, self.steps).items():
                size = self._frame_bytes(key)
                old, new = self.path / FRAMES / name, self.path / COMPACT / name
                with open(old, "rb") as source, open(new, "r+b") as target:
                    for row in range(self._env_shape.numel()):
                        source.seek(row * self._allocated_steps * size)
                        copy_bytes(source, target, self.steps * size, interrupted)
                    target.flush()
                    os.fsync(target.fileno())
        except OSError:  # interrupted, or no space for a copy
            remove_frames(self.path / COMPACT)
            return
        self._data, self._allocated_steps = COMPACT, self.steps
        self._describe(complete=False)
        remove_frames(self.path / FRAMES)

    # Description ------------------------------------------------------------------------------

    def _count(self, batch: TensorDictBase) -> None:
        try:
            frames = FrameColumns.of(batch)
        except (KeyError, RuntimeError):  # no flags, or ragged ones: the dataset counts no episodes
            return
        self._totals.add(self._scan.update(frames), has_rewards=frames.has_rewards)

    def _describe(self, *, complete: bool) -> None:
        entries = [
            {
                "key": list(as_tuple(key)),
                "shape": list(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "file": self._names.get(key),
                "bytes": self._frame_bytes(key) * self._env_shape.numel() * self._allocated_steps,
            }
            for key, (shape, dtype) in self._layout.items()
        ]
        description = {
            "complete": complete,
            "frames": self.frames,
            "steps": self.steps,
            "batch_size": [*self._env_shape, self.steps],
            "requested_steps": self._requested_steps,
            "allocated_steps": self._allocated_steps,
            "data": self._data,
            "layout": _LAYOUT if self._rows is None else _RAGGED_LAYOUT,
            **({} if self._rows is None else {"version": RAGGED_VERSION, "bytes": self._rows.num_bytes}),
            "entries": entries,
            "left_out": [list(as_tuple(key)) for key in self.left_out],
            "episodes": self.episodes,
            "source": self._source,
            "created": self._created,
            "updated": _now(),
            "versions": {
                "rollwright": rollwright.__version__,
                "torch": str(torch.__version__),
                "tensordict": str(tensordict.__version__),
                "gymnasium": gymnasium.__version__,
                "python": platform.python_version(),
            },
        }
        write_description(self.path, description)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _layout_of(batch: TensorDictBase, found: Leaves) -> Layout:
    return {key: (value.shape[batch.ndim :], value.dtype) for key, value in found.items()}


def _unstacked(batch: TensorDictBase) -> list[TensorDictBase]:
    """The TensorDicts that a lazy stack, perhaps one of lazy stacks, is made of."""
    if not isinstance(batch, LazyStackedTensorDict):
        return [batch]
    return [part for stacked in batch.tensordicts for part in _unstacked(stacked)]


def _brief(layout: tuple[torch.Size, torch.dtype] | None) -> str:
    return "absent" if layout is None else f"{str(layout[1]).removeprefix('torch.')} {list(layout[0])}"
