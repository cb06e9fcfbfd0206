"""Frames in files of others: datasets of Minari, and Parquet, which pandas and Hugging Face read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium import Space
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaf_keys, unravel
from rollwright.data.layout import DONE, TERMINATED, TRAJ_IDS, TRUNCATED
from rollwright.data.specs.conversion import Leaf, leaves_of
from rollwright.errors import require

PREFIX = "minari:"
_MINARI = "metadata.json"
_DATA = "data"  # the folder that Minari writes to, in that of a dataset


def is_parquet(path: Path) -> bool:
    """Whether :func:`load_parquet` reads it: a Parquet file, or a folder of ``save_to_disk()`` of Hugging Face."""
    if path.is_dir():
        return (path / _SHARDS).is_file() and (path / _INFO).is_file()
    return path.suffix == SUFFIX


def _saved_to_disk(arrow: Any, folder: Path) -> Any:
    """The table in a folder of ``save_to_disk()``: streams of Arrow, which ``state.json`` lists."""
    names = [each["filename"] for each in json.loads((folder / _SHARDS).read_text())["_data_files"]]
    return arrow.concat_tables(
        [arrow.ipc.open_stream(arrow.memory_map(str(folder / name))).read_all() for name in names]
    )


def minari_folder(path: Path) -> Path | None:
    """The folder in which Minari has its files of a dataset; None: ``path`` is no dataset of Minari."""
    places = (path, path / _DATA)
    return next((place for place in places if (place / _MINARI).is_file() and any(place.glob("main_data*"))), None)


def load_minari(source: str | Path, *, categorical_actions: bool = False) -> TensorDictBase:
    """The episodes of a dataset of Minari as frames, one after another, in the layout of a collector's batch.

    Args:
        source: ``"minari:NAME"``, by the id that Minari has it under on this machine; or the folder of a dataset.
        categorical_actions: discrete actions, and what else is discrete, as integers; False: one-hot, as a
            :class:`~rollwright.envs.GymEnv` has them.

    Returns:
        ``[N]``, in memory: observations and ``"action"`` under the keys that ``GymEnv`` gives them, ``("next",
        "reward")``, the flags, and ``("collector", "traj_ids")``, the number of the episode. An episode that was cut
        short counts as truncated.

    Raises:
        MissingExtraError: minari is not installed.
        FileNotFoundError: there is no such dataset; it names the command that downloads it.
        ValueError: it holds no episode, or entries that are no tensors.
    """
    dataset = _open(source)
    pieces: list[Any] = [_frames(episode, dataset, categorical_actions) for episode in dataset.iterate_episodes()]
    if not pieces:
        raise ValueError(f"{source}: this Minari dataset holds no episode.")
    frames = cast("TensorDictBase", torch.cat(pieces))
    frames.names = ["time"]
    return frames


def _open(source: str | Path) -> Any:
    require("h5py", extra="minari", purpose="a dataset of Minari")
    minari: Any = require("minari", extra="minari", purpose="a dataset of Minari")
    if isinstance(source, Path):
        folder = minari_folder(source)
        if folder is None:
            raise FileNotFoundError(f"{str(source)!r}: expected the folder of a Minari dataset, with {_MINARI} in it.")
        return minari.MinariDataset(folder)
    name = source.removeprefix(PREFIX)
    try:
        return minari.load_dataset(name, download=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{source}: Minari has no dataset {name!r} on this machine. Download it with: minari download {name}"
        ) from error


def _frames(episode: Any, dataset: Any, categorical: bool) -> TensorDict:
    """One episode, ``[T]``."""
    length = len(episode.rewards)
    root = "pixels" if _is_image(dataset.observation_space) else "observation"
    seen = leaves_of(dataset.observation_space, root, categorical)
    done_by = leaves_of(dataset.action_space, "action", categorical)
    frames = TensorDict(batch_size=[length])
    for leaf in seen:
        values = _encoded(leaf, episode.observations)
        frames[leaf.key] = values[:-1]
        frames["next", *as_tuple(leaf.key)] = values[1:]
    for leaf in done_by:
        frames[leaf.key] = _encoded(leaf, episode.actions)
    terminated, truncated = (
        torch.as_tensor(np.asarray(flags, bool)) for flags in (episode.terminations, episode.truncations)
    )
    truncated[-1] |= ~terminated[-1]
    flags = {TERMINATED: terminated, TRUNCATED: truncated, DONE: terminated | truncated}
    for name, flag in flags.items():
        frames["next", name] = flag.unsqueeze(-1)
        frames[name] = torch.zeros_like(flag).unsqueeze(-1)
    frames["next", "reward"] = torch.as_tensor(np.asarray(episode.rewards, np.float32)).unsqueeze(-1)
    frames[TRAJ_IDS] = torch.full((length,), int(episode.id))
    return frames


def _is_image(space: Space[Any]) -> bool:
    shape = space.shape or ()
    return len(shape) == 3 and str(space.dtype) == "uint8"


def _encoded(leaf: Leaf, values: Any) -> torch.Tensor:
    """The values of one entry, as its spec has them, ``[T, ...]``."""
    for step in leaf.path:
        values = values[step]
    if isinstance(values, list | tuple) or np.asarray(values).dtype.kind not in "biuf":
        raise ValueError(f"{leaf.key!r}: expected numbers, got {type(values).__name__}. Such a dataset cannot be read.")
    found = leaf.spec.expand((len(values), *leaf.spec.shape)).encode(np.ascontiguousarray(values))
    assert isinstance(found, torch.Tensor)
    return found


SUFFIX = ".parquet"
_SHARDS, _INFO = "state.json", "dataset_info.json"  # of a folder that Hugging Face has written
_ABOUT = b"rollwright"


def save_parquet(frames: TensorDictBase, path: str | os.PathLike[str]) -> None:
    """Write frames into a Parquet file, a row for each frame and a column for each entry.

    Columns have the names of entries with dots (``next.reward``); what has several elements is a list. Environments
    follow one another. ``datasets.load_dataset("parquet", data_files=path)`` reads the file, and :func:`load_dataset`
    gives back the frames as they were.

    Args:
        frames: ``[*env, T]``, of tensors.
        path: of the file, which must end in ``.parquet``; an older one is replaced.

    Raises:
        MissingExtraError: pyarrow is not installed.
        ValueError: the path has another end, or an entry is no tensor that Parquet has.
        OSError: the disk is full or failing.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise ValueError(f"path: expected a path that ends in {SUFFIX}, got {str(path)!r}.")
    arrow, files = _arrow()
    flat = frames.reshape(-1)
    columns, entries = {}, []
    for key in sorted(leaf_keys(flat), key=as_tuple):
        value: Any = flat.get(key)
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bfloat16 or value.dtype.is_complex:
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{key!r}: expected a tensor of numbers that Parquet has, got {kind}. Drop or cast it.")
        columns[".".join(as_tuple(key))] = _column(arrow, value.detach().cpu())
        dtype = str(value.dtype).removeprefix("torch.")
        entries.append({"key": list(as_tuple(key)), "shape": list(value.shape[1:]), "dtype": dtype})
    about = json.dumps({"batch_size": list(frames.batch_size), "entries": entries})
    table = arrow.table(columns).replace_schema_metadata({_ABOUT: about.encode()})
    partial = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        files.write_table(table, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load_parquet(path: Path) -> TensorDictBase:
    """Frames of a Parquet file, in memory: those of :func:`save_parquet` as they were, of other files ``[N]``.

    Raises:
        MissingExtraError: pyarrow is not installed.
        FileNotFoundError: there is no such file.
        ValueError: a column holds neither numbers nor lists of one length.
    """
    arrow, files = _arrow()
    table = _saved_to_disk(arrow, path) if path.is_dir() else files.read_table(path)
    about = json.loads((table.schema.metadata or {}).get(_ABOUT, b"null"))
    found: dict[NestedKey, torch.Tensor] = {}
    for name in table.column_names:
        found[unravel(tuple(name.split(".")))] = torch.from_numpy(_values(name, table.column(name)))
    frames = TensorDict(batch_size=[table.num_rows])
    if about is None:
        for key, value in found.items():
            frames[key] = value
        return frames
    for entry in about["entries"]:
        key = unravel(tuple(entry["key"]))
        frames[key] = found[key].reshape(table.num_rows, *entry["shape"]).to(getattr(torch, entry["dtype"]))
    shaped: TensorDictBase = frames.reshape(about["batch_size"])
    shaped.names = [*[None] * (shaped.ndim - 1), "time"]
    return shaped


def _column(arrow: Any, value: torch.Tensor) -> Any:
    flat = arrow.array(np.ascontiguousarray(value.reshape(-1).numpy()))
    size = value[0].numel() if len(value) else 1
    return flat if size == 1 else arrow.FixedSizeListArray.from_arrays(flat, size)


def _values(name: str, column: Any) -> Any:
    """The numbers of a column, ``[N]`` or ``[N, size]``."""
    if str(column.type).startswith(("fixed_size_list", "list", "large_list")):
        rows = [np.asarray(row) for row in column.to_numpy()] if len(column) else []
        if len({row.shape for row in rows}) <= 1 and all(row.dtype.kind in "biuf" for row in rows):
            return np.stack(rows)
    else:
        values = np.array(column.to_numpy())
        if values.dtype.kind in "biuf":
            return values
    raise ValueError(f"{name!r}: expected a column of numbers, or of lists of one length, got {column.type}.")


def _arrow() -> tuple[Any, Any]:
    purpose = "a Parquet file"
    return (
        require("pyarrow", extra="parquet", purpose=purpose),
        require("pyarrow.parquet", extra="parquet", purpose=purpose),
    )
