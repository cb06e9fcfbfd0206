"""WeightFeed: loads published weights into the models of a worker, between two steps."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from rollwright.weight_update._board import Board, ModelWeights, Publication
from rollwright.weight_update._destination import Destination
from rollwright.weight_update.forms import State

__all__ = ["HasModels", "HeldWeights", "StateReceiver", "WeightFeed"]

_PASSES_BEFORE_PAUSE = 3


class HasModels(Protocol):
    """An object with models by id: every collector."""

    def get_model(self, model_id: str) -> Any:
        """The model that an id names."""


class StateReceiver(ABC):
    """In place of a module: receives whole states, once they are known to be whole."""

    @abstractmethod
    def receive(self, state: State) -> None:
        """Take weights, which nobody else writes."""


class HeldWeights(StateReceiver):
    """In place of a model that is elsewhere: keeps the last weights that came for it.

    Attributes:
        state: these weights, which nobody else writes; None before the first.
    """

    def __init__(self) -> None:
        self.state: State | None = None

    def receive(self, state: State) -> None:
        """Take weights."""
        self.state = state


class WeightFeed:
    """Follows boards that one publisher writes: that of all workers, and that of this worker alone.

    Read :attr:`due` before each step. After :meth:`apply`, the models are as one publication left them: each holds the
    last weights that were published for it up to there, on any of the boards.

    Args:
        boards: to follow, as this worker's.
        version: the version that the models have.

    Attributes:
        version: of the publication that the models hold.

    Example:
        >>> from torch import nn
        >>> class Worker:
        ...     model = nn.Linear(2, 1, bias=False)
        ...     def get_model(self, model_id):
        ...         return self.model
        >>> board, worker = Board(), Worker()
        >>> feed = WeightFeed([board])
        >>> _ = board.publish(1, {"policy": nn.Linear(2, 1, bias=False).state_dict()})
        >>> feed.due, feed.apply(worker), feed.due
        (True, 1, False)
    """

    def __init__(self, boards: Sequence[Board], version: int = 0) -> None:
        self._boards = list(boards)
        self._seen = [0] * len(self._boards)  # stamps
        self._floor = 0
        self._stamps: dict[str, int] = {}
        self._overwritten: set[str] = set()  # models that older weights were written after
        self._destinations: dict[str, Destination] = {}
        self.version = version
        self._watch()

    @property
    def due(self) -> bool:
        """Whether something was published since :meth:`apply`."""
        for head, seen in self._watched:  # noqa: SIM110 - runs before each step; a generator takes twice as long
            if head[0] >> 1 != seen:
                return True
        return False

    @property
    def stamp(self) -> int:
        """Of the publication that the models hold; 0 before the first."""
        return max(self._seen, default=0)

    def skip(self) -> None:
        """Leave out what is published so far: the models have later weights, from elsewhere."""
        self._seen = [board.stamp for board in self._boards]
        self._floor = self.stamp
        self._watch()

    def apply(self, collector: HasModels, *, timeout_s: float = 30.0) -> int:
        """Copy what was published into the models.

        Args:
            collector: has the models.
            timeout_s: how long to try.

        Returns:
            The version that the models hold now.

        Raises:
            TypeError, ValueError: a model does not take the weights.
            TimeoutError: publications followed too fast all the time.
        """
        until = time.monotonic() + timeout_s
        passes = 0
        try:
            while not passes or self._overwritten or self._is_behind():
                passes += 1
                if passes > _PASSES_BEFORE_PAUSE:
                    self._ask_to_pause(True)
                again, self._overwritten = self._overwritten, set()
                for index, board in sorted(enumerate(self._boards), key=lambda found: found[1].stamp):
                    if board.stamp != self._seen[index] or again:
                        self._take(index, again, collector, max(0.0, until - time.monotonic()))
        finally:
            self._watch()
            if passes > _PASSES_BEFORE_PAUSE:
                self._ask_to_pause(False)
        return self.version

    def _is_behind(self) -> bool:
        """Whether one board has something that was published before the newest that is applied, of another."""
        newest = self.stamp
        return any(seen < newest and board.stamp != seen for board, seen in zip(self._boards, self._seen, strict=True))

    def _take(self, index: int, again: set[str], collector: HasModels, timeout_s: float) -> None:
        since = {model_id: stamp - (model_id in again) for model_id, stamp in self._stamps.items()}
        loads: list[Callable[[], None]] = []

        def copy(publication: Publication) -> None:
            loads.clear()  # of weights that were being written
            for model_id, weights in sorted(publication.models.items(), key=lambda item: item[1].stamp):
                # One that has to be loaded may be the whole of those published after it, which therefore follow it.
                load = self._copy(collector.get_model(model_id), model_id, weights, at_once=not loads)
                if load is not None:
                    loads.append(load)

        found = self._boards[index].take(since, copy, floor=self._floor, timeout_s=timeout_s)
        if found is None:
            return
        for load in loads:
            load()
        # One model may be a part of another ("policy" and "actor"): what was published last must be written last.
        oldest = min((weights.stamp for weights in found.models.values()), default=math.inf)
        later = {model_id for model_id, stamp in self._stamps.items() if stamp > oldest}
        self._overwritten |= later - found.models.keys()
        self._stamps.update({model_id: weights.stamp for model_id, weights in found.models.items()})
        self._seen[index] = found.stamp
        if found.stamp == self.stamp:
            self.version = found.version

    def _copy(self, target: Any, model_id: str, weights: ModelWeights, *, at_once: bool) -> Callable[[], None] | None:
        """Copy weights in place; where that is not enough, or too early, returns what to do once they are whole."""
        if isinstance(target, StateReceiver):
            return partial(target.receive, {**_copies(weights), **weights.extras})
        destination = self._destinations.get(model_id)
        if destination is None or not destination.fits(target, weights.specs):
            destination = Destination(target, weights.specs, weights.tensors, model_id)
            self._destinations[model_id] = destination
        if at_once and not weights.extras and destination.copy(weights.tensors):
            return None
        return partial(destination.load, {**_copies(weights), **weights.extras})

    def _ask_to_pause(self, pausing: bool) -> None:
        for board in self._boards:
            board.ask_to_pause(pausing)

    def _watch(self) -> None:
        self._watched = list(zip([board.head for board in self._boards], self._seen, strict=True))


def _copies(weights: ModelWeights) -> State:
    return {name: tensor.clone() for name, tensor in weights.tensors.items()}
