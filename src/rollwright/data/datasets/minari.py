"""Reads datasets of Minari. The only module of this package that imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium import Space
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import as_tuple
from rollwright.data.layout import DONE, TERMINATED, TRAJ_IDS, TRUNCATED
from rollwright.data.specs.gymspaces import Leaf, leaves_of
from rollwright.errors import require

PREFIX = "minari:"
_METADATA = "metadata.json"
_DATA = "data"  # the folder that Minari writes to, in that of a dataset


def minari_folder(path: Path) -> Path | None:
    """The folder in which Minari has its files of a dataset; None: ``path`` is no dataset of Minari."""
    places = (path, path / _DATA)
    return next((place for place in places if (place / _METADATA).is_file() and any(place.glob("main_data*"))), None)


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
            raise FileNotFoundError(
                f"{str(source)!r}: expected the folder of a Minari dataset, with {_METADATA} in it."
            )
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
