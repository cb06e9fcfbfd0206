"""Some environments of a batch, as a batch: ``env[1:3]``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright.envs.batched.base import BatchedEnv
from rollwright.envs.each import EACH
from rollwright.envs.factories import placed
from rollwright.errors import EnvError


class IndexedEnvs(BatchedEnv):
    """A batch of environments of which some can be stepped, reset, seeded and looked into: a base class."""

    @abstractmethod
    def step_rows(self, tensordict: TensorDictBase, marks: Sequence[bool]) -> TensorDictBase:
        """Let some environments take a step.

        Args:
            tensordict: what all act on, ``[num_workers, *batch]``; what it holds for others is not read.
            marks: for each environment, whether it is one of them.

        Returns:
            What ``_step`` does; what it holds for others means nothing.
        """

    @abstractmethod
    def reset_rows(self, tensordict: TensorDictBase | None, marks: Sequence[bool], **kwargs: Any) -> TensorDictBase:
        """Reset some environments, of these again only what ``"_reset"`` marks; see :meth:`step_rows`."""

    @abstractmethod
    def seed_rows(self, rows: Sequence[int], seed: int | None, static_seed: bool) -> int | None:
        """Seed some environments, each with what follows the last seed of the one before; returns the last."""

    @abstractmethod
    def look_up(self, name: str, rows: Sequence[int]) -> Any:
        """The values of an attribute of some environments; of a method, a function that calls it in each of them."""

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        return self.seed_rows(range(self.num_workers), seed, static_seed)

    def __getitem__(self, index: Any) -> EnvsView:
        """Some of the environments, as a batch; see :class:`EnvsView`."""
        return EnvsView(self, _rows(index, self.num_workers))


class EnvsView(BatchedEnv):
    """Some environments of a batch: ``env[1:3]`` of a ``SerialEnv`` or ``ParallelEnv``.

    They are the same environments: who steps one of them in the view has stepped it in the batch. The batch size is
    ``[n, *batch]`` for ``n`` of them, and n is 1 for ``env[1]``. Closing the view leaves the environments open; closing
    the batch ends the view. State (``state_dict()``) is the batch's.

    Args:
        batch: whose environments they are.
        rows: their places.

    Raises:
        EnvError: the batch is closed.

    Example:
        >>> from rollwright.envs import GymEnv, SerialEnv
        >>> env = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
        >>> env[1:].rollout(5).batch_size, env[0].batch_size
        (torch.Size([2, 5]), torch.Size([1]))
    """

    made_its_parts = False
    remedy_when_closed = "A view ends with its batch, or when it is closed. Index the batch again"

    _batch: IndexedEnvs
    _rows: list[int]
    _openings: int
    _ended = False

    def __init__(self, batch: IndexedEnvs, rows: Sequence[int]) -> None:
        if batch.is_closed:
            raise EnvError(f"{batch}: indexed after close(). {batch.remedy_when_closed}.")
        self.__dict__.update(_batch=batch, _rows=list(rows), _openings=batch.openings)  # no module of this one
        parts = batch.known_parts()
        super().__init__([parts[row] for row in rows], batch.device)
        everywhere = range(batch.num_workers)
        self._marks = [row in rows for row in everywhere]
        self._places = torch.tensor([rows.index(row) if row in rows else 0 for row in everywhere], device="cpu")
        self._index = torch.tensor(self._rows, device="cpu")

    def __getitem__(self, index: Any) -> EnvsView:
        """Some of these environments."""
        return EnvsView(self._batch, [self._rows[place] for place in _rows(index, self.num_workers)])

    # Stepping ---------------------------------------------------------------------------------

    def _whole(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Data of the whole batch: those of the view in its rows, and some of them in others."""
        return placed(tensordict[self._places], self._batch.device)

    def _mine(self, tensordict: TensorDictBase) -> TensorDictBase:
        return placed(tensordict[self._index], self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._batch.note_use()
        return self._mine(self._batch.step_rows(self._whole(tensordict), self._marks))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.seed_for_reset(kwargs)
        if EACH in kwargs:
            each = dict(zip(self._rows, kwargs[EACH], strict=True))
            kwargs[EACH] = [each.get(row, {}) for row in range(self._batch.num_workers)]
        whole = None if tensordict is None else self._whole(tensordict)
        self._batch.note_use()
        return self._mine(self._batch.reset_rows(whole, self._marks, **kwargs))

    def _seed_envs(self, seed: int | None, static_seed: bool) -> int | None:
        if self.is_closed:
            self._open()
        return self._batch.seed_rows(self._rows, seed, static_seed)

    def moment(self) -> object:
        """See :meth:`EnvBase.moment`."""
        return self.num_uses, self._batch.moment()

    # The end ----------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or the batch with its environments."""
        return self._ended or self._batch.is_closed or self._batch.openings != self._openings

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        self.__dict__["_ended"] = value

    def known_parts(self) -> list[Any]:
        """See :meth:`BatchedEnv.known_parts`."""
        parts = self._batch.known_parts()
        return [parts[row] for row in self._rows]

    def _open(self) -> NoReturn:
        raise EnvError(f"{self} is closed. {self.remedy_when_closed}.")

    def _reopen(self) -> None:
        """A view stays closed."""

    # The object -------------------------------------------------------------------------------

    @property
    def recreations(self) -> list[int]:
        """How many environments were in each place before."""
        counts: Any = self._batch.recreations
        return [counts[row] for row in self._rows]

    def to(self, device: torch.device | str | int | None) -> EnvsView:  # type: ignore[override]
        """Move what the view returns; the environments stay where they are."""
        super().to(device)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_rows" not in self.__dict__ or name.startswith("_") or self.is_closed:
                raise
        return self._batch.look_up(name, self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batch}, {self._rows})"


def _rows(index: Any, num_rows: int) -> list[int]:
    """The rows that an index names.

    Raises:
        IndexError: there is no such row, or one is there twice, or there is none.
        TypeError: it is no index.
    """
    if isinstance(index, slice):
        rows = list(range(num_rows))[index]
    else:
        places = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
        if places.dtype.kind not in "iu" or places.ndim > 1:
            raise TypeError(
                "index: expected a number, a slice, or a list, array or tensor of numbers of environments, got "
                f"{index!r}. Of a mask, take mask.nonzero()."
            )
        rows = [int(place) for place in places.reshape(-1)]
        if any(not -num_rows <= row < num_rows for row in rows):
            raise IndexError(f"index: expected numbers from {-num_rows} to {num_rows - 1}, got {index!r}.")
        rows = [row % num_rows for row in rows]
    if not rows or len(set(rows)) < len(rows):
        raise IndexError(f"index: expected environments of {num_rows} that differ, at least one, got {index!r}.")
    return rows
