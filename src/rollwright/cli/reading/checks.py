"""Checks of datasets: what must hold between frames, tested frame by frame."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaf_keys
from rollwright.data.layout import (
    DONE,
    IS_INIT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    DoneGroup,
    done_groups,
    end_of_trajectory,
)
from rollwright.data.layout.boundaries import any_below, find_mask, place_of

_PIECE_BYTES = 64_000_000  # read at once from data that may be larger than memory
_FLAGS = (DONE, TERMINATED, TRUNCATED)
_COUNT, _MULTISTEP = "step_count", "steps_to_next_obs"
_VERSION = "policy_version"  # of the step that acted, at the root and below "next": it may change from step to step


@dataclass(frozen=True)
class Finding:
    """Frames for which something does not hold.

    Attributes:
        text: what was found.
        frame: index of the first of them, ``(*env, t)``.
        num_frames: how many there are.
        is_error: False for what is unusual and may be meant.
    """

    text: str
    frame: tuple[int, ...]
    num_frames: int
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.text}: first at frame {list(self.frame)}, {self.num_frames:,} in all"


class _Pairs(NamedTuple):
    """Neighbouring frames t and t + 1 of a piece, bool ``[rows, n - 1]`` each.

    Attributes:
        taken: both were taken.
        inside: both belong to one trajectory.
        boundary: the second begins another one.
    """

    taken: torch.Tensor
    inside: torch.Tensor
    boundary: torch.Tensor


def check_frames(
    frames: TensorDictBase, order: NDArray[np.int64] | None = None, *, has_heads: bool = True
) -> list[Finding]:
    """Test what must hold between frames, as far as they have the entries for it.

    - ``done == terminated | truncated``
    - a trajectory id ends after a frame that is done, and is used nowhere else; where it ends elsewhere, the trajectory
      was left unfinished, which is noted
    - below ``"next"`` is what the root has one step later, inside a trajectory
    - ``is_init`` marks first steps, and no others
    - ``step_count`` begins at 0 and leaves out no number

    Args:
        frames: ``[*env, T]``, or ``[N]`` with ``order``. What :class:`~rollwright.data.postprocs.MultiStep` rewrote is
            not tested below ``"next"``.
        order: int64 indices into ``[N]`` that bring each trajectory's frames into order of time, without a gap.
        has_heads: whether a trajectory's first stored frame must be its first step; False for a buffer that has
            overwritten its oldest frames.

    Returns:
        What does not hold, the earliest frame first; empty where all is well.

    Raises:
        ValueError: there is no dimension of time, rows differ in length, or nothing distinguishes trajectories.

    Example:
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([[False], [True], [False]])
        >>> ids = torch.tensor([4, 4, 4])
        >>> frames = TensorDict({"next": {"done": done}, "collector": {"traj_ids": ids}}, [3])
        >>> print(*check_frames(frames))
        a trajectory goes on after a frame that is done: first at frame [1], 1 in all
    """
    if frames.ndim == 0 or -1 in frames.batch_size:
        raise ValueError(
            f"frames: expected [*env, T], rows of one length, got batch size {list(frames.batch_size)}. Pad the rows."
        )
    scan = _Scan(frames, has_heads)
    for start, piece, own in _pieces(frames, order):
        scan.update(piece, start, own)
    return scan.findings(order)


def _pieces(frames: TensorDictBase, order: NDArray[np.int64] | None) -> Iterator[tuple[int, TensorDictBase, int]]:
    """Start, frames, and how many of them are not in the next piece too: a piece ends with the first of the next."""
    length = frames.batch_size[-1] if order is None else len(order)
    per_step = sum(value.nbytes for _, value in _tensors(frames)) // max(1, frames.batch_size[-1])
    size = max(1, _PIECE_BYTES // max(1, per_step))
    for start in range(0, length, size):
        stop = min(start + size + 1, length)
        piece = frames[..., start:stop] if order is None else frames[torch.from_numpy(order[start:stop])]
        yield start, piece, min(size, length - start)


def _tensors(frames: TensorDictBase) -> Iterator[tuple[NestedKey, torch.Tensor]]:
    """Entries of one shape; others are left out."""
    for key in leaf_keys(frames):
        try:
            value = frames.get(key)
        except RuntimeError:  # of a lazy stack of different shapes
            continue
        if isinstance(value, torch.Tensor):
            yield key, value


class _Scan:
    """Tests the pieces of a stream of frames, one after another."""

    def __init__(self, frames: TensorDictBase, has_heads: bool) -> None:
        keys = {key for key, _ in _tensors(frames)}
        below = {key[1:] for key in map(as_tuple, keys) if key[0] == "next"}
        self._env_shape = frames.batch_size[:-1]
        self._has_heads = has_heads
        self._has_ids = TRAJ_IDS in keys
        self._summed = _MULTISTEP in keys
        flags = [key for key in below if key[-1] in _FLAGS]
        self._groups = [group for group in done_groups(flags) if as_tuple(group.done) in below]
        if not self._has_ids and (self._summed or not self._groups):
            raise ValueError(
                f"frames: expected {TRAJ_IDS!r} or ('next', 'done'), which tell trajectories apart, and there is "
                "neither. Pass frames as a collector delivers them."
            )
        shared = {key for key in map(as_tuple, keys) if key in below and key[-1] != _VERSION}
        self._shared = [] if self._summed else sorted(shared)
        self._states = [key for key in self._shared if key[-1] not in (*_FLAGS, IS_INIT)]
        self._keys = keys
        self._found: dict[str, tuple[int, int, int, bool]] = {}  # by text: time, row, count, whether an error
        self._runs: list[torch.Tensor] = []  # [n, 3]: id, time and row of the first frame

    def update(self, piece: TensorDictBase, start: int, own: int) -> None:
        """Test a piece that begins at time ``start``; its first ``own`` frames are in no later one."""
        shape = (self._env_shape.numel(), piece.batch_size[-1])
        for group in self._groups:
            self._add(self._contradicts(piece, group).reshape(shape)[:, :own], start, _said(group))
        done = torch.zeros(shape, dtype=torch.bool, device="cpu")
        if not self._summed:
            done = end_of_trajectory(piece.get("next"), self._groups, piece.ndim).reshape(shape)
        ids = piece.get(TRAJ_IDS).reshape(shape) if self._has_ids else None
        mask = find_mask(piece, place_of(piece, None))
        taken = torch.ones(shape, dtype=torch.bool, device="cpu") if mask is None else mask.reshape(shape)
        changes = done[:, :-1]
        if ids is not None:
            taken = taken & (ids >= 0)
            changes = ids[:, 1:] != ids[:, :-1]
            self._collect_runs(ids, taken, start)
        both = taken[:, 1:] & taken[:, :-1]
        pairs = _Pairs(both, both & ~changes & ~done[:, :-1], both & (changes | done[:, :-1]))
        if ids is not None and not self._summed:
            self._add(both & done[:, :-1] & ~changes, start, "a trajectory goes on after a frame that is done")
            self._add(
                both & changes & ~done[:, :-1], start, "a trajectory was left unfinished (no done)", is_error=False
            )
        self._check_neighbours(piece, pairs, start)

    def findings(self, order: NDArray[np.int64] | None) -> list[Finding]:
        """All that was found."""
        if self._runs:
            runs = torch.cat(self._runs)
            runs = runs[torch.argsort(runs[:, 1], stable=True)]
            runs = runs[torch.argsort(runs[:, 0], stable=True)]
            again = runs[1:][runs[1:, 0] == runs[:-1, 0]]
            if len(again):
                time, row = min(map(tuple, again[:, 1:].tolist()))
                text = "a trajectory id comes back after other trajectories, or in two environments"
                self._found[text] = (time, row, len(again), True)
        found = sorted(self._found.items(), key=lambda item: (*item[1][:2], item[0]))
        return [
            Finding(text, self._frame(row, time if order is None else int(order[time])), count, is_error)
            for text, (time, row, count, is_error) in found
        ]

    def _frame(self, row: int, time: int) -> tuple[int, ...]:
        return (*(map(int, np.unravel_index(row, self._env_shape)) if self._env_shape else ()), time)

    def _add(self, bad: torch.Tensor, start: int, text: str, *, is_error: bool = True) -> None:
        """Keep the first of the frames that ``bad`` ``[rows, n]`` marks, and count them."""
        where = bad.T.nonzero()
        if len(where):
            time, row = where[0].tolist()
            first_time, first_row, count, _ = self._found.get(text, (start + time, row, 0, is_error))
            self._found[text] = (first_time, first_row, count + len(where), is_error)

    @staticmethod
    def _contradicts(piece: TensorDictBase, group: DoneGroup) -> torch.Tensor:
        """Bool ``[*env, n]``: ``done`` is not what the other flags of its group make it."""
        outcome = piece.get("next")
        done: torch.Tensor = outcome.get(group.done)
        terminated = outcome.get(group.terminated, None)
        truncated = None if group.truncated is None else outcome.get(group.truncated, None)
        if terminated is not None and truncated is not None:
            bad = done != (terminated | truncated)
        else:  # done may have a cause that is not stored
            bad = torch.zeros_like(done)
            for flag in (terminated, truncated):
                bad = bad if flag is None else bad | (flag & ~done)
        return any_below(bad, piece.ndim)

    def _collect_runs(self, ids: torch.Tensor, taken: torch.Tensor, start: int) -> None:
        """Note where runs of one id begin; a run that goes on from the piece before begins there."""
        begins = taken.clone()
        begins[:, 1:] &= (ids[:, 1:] != ids[:, :-1]) | ~taken[:, :-1]
        if start:
            begins[:, 0] = False  # this frame was the last of the piece before
        row, time = begins.nonzero(as_tuple=True)
        self._runs.append(torch.stack([ids[row, time], start + time, row], -1))

    def _check_neighbours(self, piece: TensorDictBase, pairs: _Pairs, start: int) -> None:
        """What frame t holds of frame t + 1."""
        goes_on = torch.ones_like(pairs.taken)
        for key in self._shared:
            same = _equal(_rows(piece, ("next", *key))[:, :-1], _rows(piece, key)[:, 1:])
            self._add(pairs.inside & ~same, start, f"{('next', *key)} is not {'.'.join(key)} of the frame that follows")
            if key in self._states:
                goes_on &= same
        # A cut that was asked for (set_truncated) begins a trajectory in the middle of an episode.
        fresh = pairs.boundary & ~goes_on & self._has_heads
        if IS_INIT in self._keys:
            first = _rows(piece, (IS_INIT,)).any(-1)
            self._add(_second(pairs.inside & first[:, 1:]), start, "is_init is set inside a trajectory")
            self._add(_second(fresh & ~first[:, 1:]), start, "is_init is not set at the first step of a trajectory")
        if _COUNT in self._keys:
            count = _rows(piece, (_COUNT,))
            gap = (count[:, 1:] != count[:, :-1] + 1).any(-1)
            self._add(_second(pairs.inside & gap), start, "step_count does not go up by 1 inside a trajectory")
            late = (count[:, 1:] != 0).any(-1)
            self._add(_second(fresh & late), start, "step_count is not 0 at the first step of a trajectory")


def _said(group: DoneGroup) -> str:
    place = ".".join(["next", *group.prefix])
    return f"{place}.done is not {place}.terminated | {place}.truncated"


def _second(bad: torch.Tensor) -> torch.Tensor:
    """Marks of pairs as marks of their second frames."""
    return torch.nn.functional.pad(bad, (1, 0))


def _rows(piece: TensorDictBase, key: tuple[str, ...]) -> torch.Tensor:
    """An entry as ``[rows, n, features]``."""
    value: torch.Tensor = piece.get(key)
    return value.reshape(piece.batch_size[:-1].numel(), piece.batch_size[-1], value.shape[piece.ndim :].numel())


def _equal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Bool ``[rows, n]``: all features are the same, NaN included."""
    same: torch.Tensor = left == right
    if left.dtype.is_floating_point:
        same |= left.isnan() & right.isnan()
    return same.all(-1)
