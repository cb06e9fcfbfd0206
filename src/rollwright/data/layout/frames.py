"""Frames of any content: stacked along time; and blank ones, for times that were not taken and for padding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from rollwright._keys import NestedKey, unravel
from rollwright.data.layout.boundaries import TRAJ_IDS

_EMPTY = (str, bytes, bool, int, float, list, tuple, dict, set)


def blank_frame(
    frames: Sequence[TensorDictBase], *, ragged: Collection[NestedKey] = (), padding: float = 0.0, traj_id: float = -1
) -> TensorDictBase:
    """A frame of the form of others that holds nothing.

    Args:
        frames: at least one, all ``[*env]``; they have the same entries.
        ragged: entries whose first dimension has any size, whether or not it differs between these frames.
        padding: the value of tensors.
        traj_id: the value of trajectory ids.

    Returns:
        ``[*env]``, in memory of its own: tensors hold ``padding``, and are empty along dimensions whose size differs
        between frames or environments; text is ``""``, other objects are empty ones of their type, or None.

    Example:
        >>> frames = [TensorDict({"tokens": torch.arange(n), "x": torch.ones(2)}).set("text", "yes") for n in (1, 3)]
        >>> blank = blank_frame(frames)
        >>> blank["tokens"].shape, blank["x"], blank["text"]
        (torch.Size([0]), tensor([0., 0.]), '')
    """
    return cast(TensorDictBase, _Blanks(set(ragged), padding, traj_id).of(frames, (), frames[0].ndim))


def is_dense(frame: TensorDictBase) -> bool:
    """Whether all entries are tensors in plain TensorDicts."""
    values: Any = frame.values(True)
    return not isinstance(frame, LazyStackedTensorDict) and all(
        isinstance(value, torch.Tensor) or type(value) is TensorDict for value in values
    )


def stack_frames(frames: Sequence[TensorDictBase], dim: int, name: str | None = "time") -> TensorDictBase:
    """Frames in one TensorDict: densely where all entries have one shape, else lazily.

    Args:
        frames: at least one, ``[*env]``, or any rows.
        dim: where the new dimension is, and what a lazy stack of ragged frames is stacked along.
        name: of the new dimension.

    Returns:
        ``[*env, T]`` for ``dim=len(env)``; a copy where it is dense.
    """
    stacked: Any
    try:
        stacked = LazyStackedTensorDict.maybe_dense_stack(list(frames), dim)
    except RuntimeError:  # some frames are lazy stacks with ragged entries, and others are not
        stacked = None
    lazy = stacked is None or isinstance(stacked, LazyStackedTensorDict)
    if lazy and (stacked is None or stacked.stack_dim == dim or _varies(stacked)):
        # not rows of stacks, each ragged in itself; named at once, for names that are set later read every entry
        return LazyStackedTensorDict(*frames, stack_dim=dim, stack_dim_name=name)
    names = list(frames[0].names)
    stacked.names = [*names[:dim], name, *names[dim:]]
    return cast(TensorDictBase, stacked)


def _varies(stacked: LazyStackedTensorDict) -> bool:
    return any(isinstance(row, LazyStackedTensorDict) for row in stacked.tensordicts)


class _Blanks:
    def __init__(self, ragged: set[NestedKey], padding: float, traj_id: float) -> None:
        self._ragged, self._padding, self._traj_id = ragged, padding, traj_id

    def of(self, values: Sequence[Any], place: tuple[str, ...], ndim: int) -> Any:
        """The blank of one entry, given as it is in each frame; ``ndim``: dimensions of the environments."""
        like = values[-1]
        if isinstance(like, torch.Tensor):
            return self._tensor(values, unravel(place), ndim)
        if is_non_tensor(like):
            return _object(like)
        if is_tensorclass(like):
            inside = self.of([value._tensordict for value in values], place, ndim)
            return type(like)._from_tensordict(inside)
        if isinstance(like, LazyStackedTensorDict):
            return self._stack(values, like.stack_dim, place, ndim)
        out = TensorDict({}, like.batch_size, device=like.device)
        nodes = [dict(value.items()) for value in values]
        for key in nodes[-1]:
            entries = [node[key] for node in nodes if key in node]
            out.set(key, self.of(entries, (*place, str(key)), ndim))
        return out

    def _stack(self, values: Sequence[Any], dim: int, place: tuple[str, ...], ndim: int) -> Any:
        rows = [value.unbind(dim) for value in values]
        if dim < ndim:  # environments, whose sizes differ from one another as they do from frame to frame
            every = [row for each in rows for row in each]
            blanks = [self.of(every, place, ndim - 1) for _ in rows[-1]]
        else:  # agents, say: each has a form of its own
            blanks = [self.of(list(each), place, ndim) for each in zip(*rows, strict=True)]
        return LazyStackedTensorDict(*blanks, stack_dim=dim)

    def _tensor(self, values: Sequence[torch.Tensor], key: NestedKey, ndim: int) -> torch.Tensor:
        like = values[-1]
        if key == TRAJ_IDS:
            return torch.full_like(like, self._traj_id)
        shapes = {value.shape for value in values}
        shape = list(like.shape)
        for at in range(ndim, len(shape)):
            sizes = {other[at] for other in shapes if len(other) == len(shape)}
            if len(sizes) > 1 or (at == ndim and key in self._ragged):
                shape[at] = 0
        return like.new_full(shape, self._padding)


def _object(like: Any) -> Any:
    if isinstance(like, LazyStackedTensorDict):
        return NonTensorStack(*[_object(row) for row in like.tensordicts], stack_dim=like.stack_dim)
    kind = type(like.data)
    return NonTensorData(kind() if kind in _EMPTY else None, batch_size=like.batch_size, device=like.device)
