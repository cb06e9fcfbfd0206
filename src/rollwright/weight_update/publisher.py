"""Publisher: sends the weights of several models to a group of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rollwright._memory import Segment
from rollwright.weight_update._board import Board
from rollwright.weight_update._boards import Boards
from rollwright.weight_update._scheme import WeightSyncScheme
from rollwright.weight_update.forms import State
from rollwright.weight_update.receiving import check_schemes
from rollwright.weight_update.schemes import SharedMemWeightSyncScheme

__all__ = ["Publisher", "Update"]


class Update(NamedTuple):
    """Weights for some workers.

    Attributes:
        workers: their indices; None: all.
        models: flat states by model.
    """

    workers: Sequence[int] | None
    models: Mapping[str, State]


class Publisher:
    """Publishes the weights of several models to a group of workers.

    All models of an update go to the same boards, so that a worker gets them in one publication: to the common one,
    unless the scheme of one of them keeps workers apart.

    Args:
        num_workers: how many there are.
        schemes: by model.
        default: for models without one; None: :class:`SharedMemWeightSyncScheme` with ``strategy="state_dict"``.

    Example:
        >>> import torch
        >>> publisher = Publisher(2)
        >>> publisher.publish([Update([1], {"policy": {"weight": torch.zeros(3)}})], version=1)
        >>> [[board.version for board in publisher.boards(worker)] for worker in range(2)]
        [[-1, -1], [-1, 1]]
    """

    def __init__(
        self,
        num_workers: int,
        schemes: Mapping[str, WeightSyncScheme] | None = None,
        *,
        default: WeightSyncScheme | None = None,
    ) -> None:
        check_schemes("weight_sync_schemes", schemes)
        self._schemes = dict(schemes or {})
        self._default = SharedMemWeightSyncScheme(strategy="state_dict") if default is None else default
        self._boards = Boards(num_workers)

    def scheme(self, model_id: str) -> WeightSyncScheme:
        """How a model's weights travel."""
        return self._schemes.get(model_id, self._default)

    def boards(self, worker: int) -> list[Board]:
        """What a worker follows; see :meth:`Boards.of`."""
        return self._boards.of(worker)

    def publish(self, updates: Iterable[Update], version: int, *, timeout_s: float = 1.0) -> None:
        """Publish updates that belong to one version; each reaches its workers whole.

        Args:
            updates: no worker may be in two of them.
            version: of all of them.
            timeout_s: how long to wait for workers that cannot keep up, for each board.
        """
        for update in updates:
            models = {model_id: state for model_id, state in update.models.items() if self.scheme(model_id).sends}
            shared = all(self.scheme(model_id).shares for model_id in models)
            self._boards.publish(version, models, update.workers, shared=shared, timeout_s=timeout_s)

    def segments(self) -> list[Segment]:
        """The memory of all boards."""
        return self._boards.segments()

    def forget(self, worker: int) -> None:
        """Wait no more for a worker that is dead."""
        self._boards.forget(worker)
