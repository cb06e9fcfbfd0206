"""Weights as files, for engines that read them in another process."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollwright._keys import key_str
from rollwright.errors import require
from rollwright.weight_update.forms import flat_state, is_extra, of_part

_MEMORY = Path("/dev/shm")

Shapes = Mapping[str, tuple[int, ...]]


class WeightFiles:
    """A folder with weights in the format safetensors; one that was made here is removed with the last reference to it.

    Args:
        path: of the folder.
        temporary: whether it is removed.
    """

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        self.path = path
        if temporary:
            weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)

    @classmethod
    def of(cls, weights: Any, name: str, shapes: Shapes | None = None, folder: Path | None = None) -> WeightFiles:
        """Write weights, in memory where the machine has a file system there with room.

        Args:
            weights: a module, a TensorDict or a ``state_dict``, by the names of transformers; of the model, or of a
                module that holds it as ``model``. Or files that there are: ``WeightFiles``, or the path of a folder.
            name: what takes them, for messages.
            shapes: by name, of what is expected; None: it is not known.
            folder: to write below; None: in memory where there is room, else where temporary files are.

        Raises:
            TypeError: ``weights`` is none of these.
            ValueError: names or shapes differ from ``shapes``, or the folder has no such files.
        """
        if isinstance(weights, WeightFiles):
            return weights
        if isinstance(weights, str | os.PathLike):
            path = Path(weights)
            if not any(path.glob("*.safetensors")):
                raise ValueError(
                    f"weights for {name}: expected a folder with files *.safetensors, got {str(path)!r}. Write them "
                    "with model.save_pretrained(folder)."
                )
            return cls(path)
        state = state_of(weights, name, shapes)
        size = sum(value.nbytes for value in state.values())
        if folder is None and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 1.1 * size:
            folder = _MEMORY
        files = cls(Path(tempfile.mkdtemp(prefix="rollwright-weights-", dir=folder)), temporary=True)
        save = require("safetensors.torch", name="save_file", extra="llm", purpose="an update of weights by file")
        save(state, files.path / "model.safetensors", metadata={"format": "pt"})
        return files


def state_of(weights: Any, name: str, shapes: Shapes | None) -> dict[str, torch.Tensor]:
    """Weights by the names of transformers, contiguous, each with memory of its own.

    Raises:
        TypeError, ValueError: as in :meth:`WeightFiles.of`.
    """
    state = {key: value for key, value in flat_state(weights, name).items() if not _is_left_out(key)}
    if shapes is not None:
        state = of_part(state, shapes.keys(), "model")
        _check(state, shapes, name)
        state = {key: state[key] for key in shapes}  # not the buffers that files leave out, nor tied weights twice
    elif any(key.startswith("model.model.") for key in state):  # of a wrapper around it
        state = {key.removeprefix("model."): value for key, value in state.items()}
    seen: set[int] = set()
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"weights for {name}: expected a tensor at {key!r}, got {type(value).__name__}.")
        value = value.detach().contiguous()
        state[key] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return state


def _is_left_out(key: str) -> bool:
    """Whether files have no such weight: extra state, and the frequencies of rotary embeddings."""
    return is_extra(key) or key.endswith("inv_freq")


def shapes_in(folder: str | os.PathLike[str]) -> Shapes | None:
    """Shapes of the weights in a folder, by name; None where it is no folder, or has no files of safetensors."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")) if os.path.isdir(folder) else []:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        found.update((name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__")
    return found or None


def _check(state: Mapping[str, Any], shapes: Shapes, name: str) -> None:
    if missing := shapes.keys() - state.keys():
        raise ValueError(
            f"weights for {name}: names differ from those of its model. Missing: {key_str(missing)}; unknown: "
            f"{key_str(state.keys() - shapes.keys()) or 'none'}. Pass the model of transformers that was trained, "
            "whole."
        )
    for key, expected in shapes.items():
        if (shape := tuple(state[key].shape)) != expected:
            raise ValueError(f"weights for {name}: {key!r} has shape {list(shape)}, expected {list(expected)}.")
