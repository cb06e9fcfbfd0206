"""Writes the complete episodes of a dataset as a Minari dataset. The only module that imports Minari."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from tensordict import TensorDictBase
from torch import Tensor

from rollwright._keys import as_tuple
from rollwright._progress import count
from rollwright.cli.console import Console
from rollwright.cli.errors import Failure, brief
from rollwright.data.datasets import load_dataset, remove_dataset
from rollwright.data.specs import NonTensor
from rollwright.data.specs.conversion import Leaf, leaves_of
from rollwright.envs import GymEnv
from rollwright.errors import MissingExtraError, require

_ROOT_VARIABLE = "MINARI_DATASETS_PATH"
_DATA = "data"  # the folder that Minari writes to, in that of a dataset
_MINARIS = re.compile(r"main_data\.hdf5|metadata\.json|\d+")  # what is in it


@dataclass(frozen=True)
class Export:
    """An export to a Minari dataset.

    Frames are collected into a rollwright dataset first, so that memory does not grow and nothing is lost
    when the collection is cut short; their complete episodes are then written, and the frames deleted.

    Attributes:
        dataset_id: the id to load it by.
        root: folder of all Minari datasets.
        frames: where frames rest in between; a hidden folder, which Minari does not list.
        overwrite: replace a dataset of the same id.
    """

    dataset_id: str
    root: Path
    frames: Path
    overwrite: bool

    @classmethod
    def plan(cls, env_id: str, policy: str, dataset_id: str | None, output: Path | None, *, overwrite: bool) -> Export:
        """Decide on id and folders.

        Raises:
            Failure: Minari is missing, the id is malformed, or there is a dataset of that id, or other files.
        """
        package = _minari()
        name = "random" if policy == "random" else _slug(Path(policy).stem if policy.endswith(".pt2") else policy)
        dataset_id = dataset_id or f"rollwright/{_slug(env_id, '/')}/{name}-v0"
        try:
            package.dataset.minari_dataset.parse_dataset_id(dataset_id)
        except (TypeError, ValueError) as error:
            raise Failure(
                f"--dataset-id: expected [NAMESPACE/]NAME-vN of letters, digits, - and _, got {dataset_id!r}."
            ) from error
        with _root(output):
            root = Path(package.storage.get_dataset_path()).absolute()  # Minari joins a relative one to itself
        export = cls(dataset_id, root, root / ".rollwright" / dataset_id.replace("/", "."), overwrite)
        if export.target.exists() and not overwrite:
            raise Failure(
                f"--dataset-id: {dataset_id!r} exists already in {root}. Choose another id or version, or pass "
                "--overwrite."
            )
        others = _files_of_others(export.target)
        if others:
            raise Failure(
                f"--overwrite: {export.target} holds {', '.join(others)}, which Minari did not write. Move it "
                "elsewhere, or choose another --dataset-id."
            )
        return export

    @property
    def target(self) -> Path:
        """Folder of the dataset."""
        return self.root / self.dataset_id

    def check(self, env: GymEnv, *, categorical: bool) -> None:
        """Test before anything is collected that Minari can hold what the environment gives.

        Raises:
            Failure: an entry is no tensor.
        """
        for leaf in (*_observations(env, categorical), *_actions(env, categorical)):
            if isinstance(leaf.spec, NonTensor):
                raise Failure(
                    f"--format minari: {leaf.key!r} is of the space {type(leaf.space).__name__}, which is not "
                    "supported. Wrap the environment so that it gives numbers, or leave --format out."
                )

    def run(
        self, env: GymEnv, arguments: argparse.Namespace, console: Console, interrupted: Callable[[], bool]
    ) -> None:
        """Write the dataset, print what was left out, and delete the frames.

        Raises:
            Failure: no episode was complete, or writing failed; the frames are kept.
        """
        frames = load_dataset(self.frames)
        frames = frames.unsqueeze(0) if frames.ndim == 1 else frames
        ended = frames["next", "done"].squeeze(-1)
        ends, unfinished = int(ended.sum()), int((~ended[:, -1]).sum())
        kept, left_out = _frames_kept(ended.numpy()), frames.numel() - _frames_kept(ended.numpy())
        rest = f"The frames are kept in {self.frames} (rollwright inspect shows them)."
        if not ends:
            raise Failure(
                f"No episode ended within {frames.numel():,} frames, and Minari keeps whole episodes. {rest} Collect "
                "more --frames.",
                status=1,
            )
        self._remove()  # only now that there is something to replace it with
        try:
            seed = None if arguments.workers else arguments.seed  # each worker's environments have seeds of their own
            episodes = _episodes(frames, env, arguments.categorical_actions, seed, interrupted)
            self._create(episodes, env, arguments, console)
        except _Interrupted:
            self._remove()
            console.alert(f"the Minari dataset was not written. {rest}")
            return
        except Exception as error:
            self._remove()
            raise Failure(f"Minari could not write {self.dataset_id!r}: {brief(error)}. {rest}", status=1) from error
        del frames, ended
        remove_dataset(self.frames)
        for folder in (self.frames, self.frames.parent):
            if not any(folder.iterdir()):
                folder.rmdir()
        console.line(f"saved {count(ends, 'episode')}, {kept:,} frames, as {self.dataset_id} in {self.root}")
        if unfinished:
            console.line(f"left out: {count(unfinished, 'unfinished episode')}, {count(left_out, 'frame')}")
        variable = "" if arguments.output is None else f"with {_ROOT_VARIABLE}={self.root} set, "
        console.line(f"load it: {variable}minari.load_dataset({self.dataset_id!r})")

    def _remove(self) -> None:
        """Remove the dataset, and nothing else that its folder may hold."""
        shutil.rmtree(self.target / _DATA, ignore_errors=True)
        with suppress(OSError):  # it holds other files, or is not there
            self.target.rmdir()

    def _create(self, episodes: Iterator[Any], env: GymEnv, arguments: argparse.Namespace, console: Console) -> None:
        single = getattr(env.gym_env.unwrapped, "envs", [env.gym_env])[0]  # Minari wants one environment, not a vector
        try:
            single.spec.to_json()
        except Exception:  # registered with a class instead of the name of one, for instance
            console.line("note: Minari cannot write down how to make this environment, and leaves that out")
            single = None
        with _root(self.root), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # asks for an author, a permalink and the like
            _minari().create_dataset_from_buffers(
                self.dataset_id,
                episodes,
                env=single,
                observation_space=_space(env, "observation"),
                action_space=_space(env, "action"),
                algorithm_name=arguments.policy,
                description=f"Collected by rollwright from {arguments.env_id}, policy {arguments.policy}, seed "
                f"{arguments.seed}.",
                jpeg_encoding=False,  # which would change pixels
            )


class _Interrupted(Exception):
    """The user does not want to wait for the episodes to be written."""


def _files_of_others(target: Path) -> list[str]:
    """What the folder of a dataset holds that Minari has not written, by name."""
    data = target / _DATA
    others = [found for found in (target.iterdir() if target.is_dir() else ()) if found != data]
    others += [found for found in (data.iterdir() if data.is_dir() else ()) if not _MINARIS.fullmatch(found.name)]
    return sorted(str(found.relative_to(target)) for found in others)


def _minari() -> Any:
    try:
        require("h5py", extra="minari", purpose="--format minari")
        require("minari.storage", extra="minari", purpose="--format minari")
        return require("minari", extra="minari", purpose="--format minari")
    except MissingExtraError as error:
        raise Failure(str(error)) from error


@contextmanager
def _root(folder: Path | None) -> Iterator[None]:
    """Let Minari keep its datasets in ``folder``; None: where it does anyway."""
    before = os.environ.get(_ROOT_VARIABLE)
    if folder is not None:
        os.environ[_ROOT_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if folder is not None:
            del os.environ[_ROOT_VARIABLE]
            if before is not None:
                os.environ[_ROOT_VARIABLE] = before


def _slug(text: str, also: str = "") -> str:
    """Text as a part of a Minari id.

    >>> _slug("ALE/Pong-v5", "/"), _slug("my.module:make")
    ('ale/pong-v5', 'my-module-make')
    """
    return re.sub(rf"[^\w{also}-]+", "-", text).strip("-/").lower()


# Episodes ------------------------------------------------------------------------------------------


def _frames_kept(ended: np.ndarray[Any, Any]) -> int:
    """Frames up to the last end in each row of ``[rows, T]``."""
    stops = ended.shape[1] - np.argmax(ended[:, ::-1], axis=1)
    return int(stops[ended.any(1)].sum())


def _episodes(
    frames: TensorDictBase, env: GymEnv, categorical: bool, seed: int | None, interrupted: Callable[[], bool]
) -> Iterator[Any]:
    """The complete episodes of ``[env, T]``, environment by environment, as Minari's buffers."""
    buffer = _minari().data_collector.EpisodeBuffer
    observations, actions = _observations(env, categorical), _actions(env, categorical)
    ended = frames["next", "done"].squeeze(-1).numpy()
    for row in range(frames.batch_size[0]):
        start = 0
        for stop in (np.flatnonzero(ended[row]) + 1).tolist():
            if interrupted():
                raise _Interrupted
            episode = frames[row, start:stop]
            seen = {leaf.path: _with_last(episode, leaf) for leaf in observations}
            done = {leaf.path: _raw(leaf, episode.get(leaf.key)) for leaf in actions}
            yield buffer(
                seed=seed + row
                if start == 0 and seed is not None
                else None,  # later episodes go on from the first one's generator
                observations=_assembled(_space(env, "observation"), seen),
                actions=_assembled(_space(env, "action"), done),
                rewards=episode["next", "reward"].squeeze(-1).numpy(),
                terminations=episode["next", "terminated"].squeeze(-1).numpy(),
                truncations=episode["next", "truncated"].squeeze(-1).numpy(),
                infos={},
            )
            start = stop


def _space(env: GymEnv, kind: str) -> Space[Any]:
    space: Space[Any] = getattr(env, f"{'single_' if env.batch_size else ''}{kind}_space")
    return space


def _observations(env: GymEnv, categorical: bool) -> list[Leaf]:
    root = "pixels" if any(as_tuple(key)[0] == "pixels" for key in env.observation_keys) else "observation"
    return leaves_of(_space(env, "observation"), root, categorical)


def _actions(env: GymEnv, categorical: bool) -> list[Leaf]:
    return leaves_of(_space(env, "action"), "action", categorical)


def _with_last(episode: TensorDictBase, leaf: Leaf) -> np.ndarray[Any, Any]:
    """``[T + 1, ...]``: what was seen before each step, and after the last."""
    before, after = episode.get(leaf.key), episode.get(("next", *as_tuple(leaf.key)))
    return np.concatenate([_raw(leaf, before), _raw(leaf, after[-1:])])


def _raw(leaf: Leaf, value: Tensor) -> np.ndarray[Any, Any]:
    """Values as the environment's space has them, ``[T, *space.shape]``."""
    raw = np.asarray(leaf.spec.to_numpy(value))
    return raw.astype(leaf.space.dtype, copy=False).reshape(len(value), *(leaf.space.shape or ()))


def _assembled(space: Space[Any], values: dict[tuple[Any, ...], Any], path: tuple[Any, ...] = ()) -> Any:
    """Arrays in the dictionaries and tuples of the space."""
    if isinstance(space, spaces.Dict):
        return {name: _assembled(child, values, (*path, name)) for name, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_assembled(child, values, (*path, i)) for i, child in enumerate(space.spaces))
    return values[path]
