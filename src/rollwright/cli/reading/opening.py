"""Opens datasets, files of frames and saved replay buffers for ``rollwright inspect``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaf_keys
from rollwright._video import as_frames
from rollwright.cli.errors import Failure, plain
from rollwright.data.datasets import describe_dataset, load_dataset
from rollwright.data.datasets.description import COMPACT, DESCRIPTION, FRAMES
from rollwright.data.datasets.formats import PREFIX, is_parquet, minari_folder
from rollwright.data.layout import TRAJ_IDS
from rollwright.data.loading import load_mapped, load_saved
from rollwright.data.replay_buffers import LazyMemmapStorage, RaggedStorage
from rollwright.data.replay_buffers.storages.memory import ROWS_FILE, STATE_FILE
from rollwright.data.replay_buffers.storages.saving import LIST_FILE
from rollwright.errors import MissingExtraError

_REMEDY = "Pass --allow-pickle"


class Found(NamedTuple):
    """Content of a path.

    Attributes:
        frames: ``[*env, T]``; of a buffer of one dimension ``[N]``, in the order in which they were written.
        description: of a dataset.
        order: int64 indices into ``[N]`` that bring each trajectory's frames together; None: they are.
        has_heads: whether first frames of trajectories are there; False where a ring has overwritten its oldest.
        buffer: counts, of a replay buffer.
    """

    frames: TensorDictBase | None
    description: dict[str, Any] | None = None
    order: NDArray[np.int64] | None = None
    has_heads: bool = True
    buffer: dict[str, int] | None = None

    def in_order(self) -> TensorDictBase | None:
        """The frames with each trajectory's together."""
        if self.frames is None or self.order is None:
            return self.frames
        return self.frames[torch.from_numpy(self.order)]


def open_frames(path: Path, *, allow_pickle: bool = False) -> Found:
    """Frames, and what is known of them.

    Args:
        path: what to open.
        allow_pickle: load pickles, which can run any code.

    Raises:
        Failure: there is nothing to read.
    """
    if path.name in (FRAMES, COMPACT) and (path.parent / DESCRIPTION).is_file():
        path = path.parent  # whose description says how many of the frames are complete
    if path.name in (ROWS_FILE, LIST_FILE, STATE_FILE):
        path = path.parent
    try:
        if str(path).startswith(PREFIX) or (path.exists() and is_parquet(path)) or minari_folder(path) is not None:
            return Found(load_dataset(path))
        if not path.exists():
            raise Failure(
                f"there is no {str(path)!r}. Name a folder that rollwright collect or a replay buffer wrote, or a .pt "
                "file."
            )
        if path.is_file():
            return Found(_load_file(path, allow_pickle))
        if (path / DESCRIPTION).is_file():
            description = describe_dataset(path)
            return Found(load_dataset(path) if description["steps"] else None, description)
        if (path / "meta.json").is_file():
            return Found(load_mapped(path, allow_pickle=allow_pickle, remedy=_REMEDY))
        if (path / ROWS_FILE).is_file():
            return _rows_of(path)
        if (path / LIST_FILE).is_file():
            return _items_of(path, allow_pickle)
    except Failure:
        raise
    except MissingExtraError as error:
        raise Failure(str(error)) from error
    except FileNotFoundError as error:
        raise Failure(plain(error)) from error
    except Exception as error:
        raise Failure(f"{str(path)!r} cannot be read: {plain(error)}", status=1) from error
    raise Failure(
        f"{str(path)!r} holds neither a {DESCRIPTION}, a memory-mapped TensorDict, a replay buffer nor a dataset of "
        "Minari."
    )


def _load_file(path: Path, allow_pickle: bool) -> TensorDictBase:
    loaded = load_saved(path, allow_pickle=allow_pickle, remedy=_REMEDY)
    if not isinstance(loaded, TensorDictBase):
        raise Failure(f"{str(path)!r} holds a {type(loaded).__name__}, expected a TensorDict written by torch.save.")
    return loaded


# Replay buffers ------------------------------------------------------------------------------------


def _rows_of(path: Path) -> Found:
    with warnings.catch_warnings(record=True):  # rows that a killed writer has lost are counted below
        warnings.simplefilter("always")
        storage = LazyMemmapStorage(scratch_dir=path, existsok=True)
    ledger = storage.ledger
    counts = {"room_for": storage.max_size, "written": ledger.write_count * storage.columns, "lost": ledger.num_lost}
    if not len(storage):
        return Found(None, buffer=counts)
    frames = storage.in_order()
    if not isinstance(frames, TensorDictBase):
        raise Failure(f"{str(path)!r} holds rows of {tuple(frames.shape)}, which are no frames of an environment.")
    return Found(frames, None, _order(frames), ledger.live()[0] == 0, counts)


def _items_of(path: Path, allow_pickle: bool) -> Found:
    state = load_saved(path / LIST_FILE, allow_pickle=allow_pickle, remedy=_REMEDY)
    saved = state["elements"] or []
    written = state["high"] - state["lost"] + state.get("skipped", 0)
    counts = {"room_for": state["max_size"], "written": written, "lost": state["lost"]}
    items = RaggedStorage.elements_of_state(state) if isinstance(saved, dict) else saved
    if not items:
        return Found(None, buffer=counts)
    if not all(isinstance(item, TensorDictBase) for item in items):
        raise Failure(
            f"{str(path)!r} holds a list of {type(items[0]).__name__}, which are no frames of an environment."
        )
    frames = LazyStackedTensorDict.maybe_dense_stack(items, 0)
    return Found(frames, None, _order(frames), state["low"] == 0, counts)


def _order(frames: TensorDictBase) -> NDArray[np.int64] | None:
    """Each trajectory's frames together, in the order in which they were written: writers may have taken turns."""
    ids = frames.get(TRAJ_IDS, None) if frames.ndim == 1 else None
    if ids is None:
        return None
    values = ids.reshape(-1).numpy(force=True)
    _, first, which = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first[which], kind="stable")
    return None if bool((order == np.arange(len(order))).all()) else order


# Images


def image_key(frames: TensorDictBase) -> NestedKey | None:
    """The entry at the root that holds images, uint8 ``[*env, T, H, W, C]`` or ``[*env, T, C, H, W]``."""
    for key in sorted(leaf_keys(frames), key=lambda key: ("pixels" not in as_tuple(key), as_tuple(key))):
        value: Any = frames.get(key) if as_tuple(key)[0] != "next" else None
        is_image = isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == frames.ndim + 3
        if is_image and {value.shape[-1], value.shape[-3]} & {1, 3}:
            return key
    return None


def images_of(row: TensorDictBase, key: NestedKey) -> Any:
    """Images of frames ``[T]`` as uint8 ``[T, H, W, 3]``."""
    value = row.get(key)
    return as_frames("frames", value.movedim(-1, 1) if value.shape[-1] in (1, 3) else value)
