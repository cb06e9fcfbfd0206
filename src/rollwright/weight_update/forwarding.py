"""Forwarder: takes what was published for several receivers, once for all of them, to be sent elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rollwright.weight_update._board import Board, Publication

__all__ = ["Copies", "Forwarded", "Forwarder"]


class Forwarded(NamedTuple):
    """Weights that were published together.

    Attributes:
        receiver: who gets them; None: all.
        version: of the publication.
        models: by id, those that have changed: copies of their tensors by name, and what else belongs to their state.
    """

    receiver: int | None
    version: int
    models: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]


_Found = tuple[int, int, dict[str, Any]]  # stamp, version, models
Copies = dict[tuple[int | None, int, int], _Found | None]
"""By receiver, and the publications between which it was made."""


class Forwarder:
    """Takes what was published for some receivers since it was taken last.

    Example:
        >>> from rollwright.weight_update.publisher import Publisher, Update
        >>> publisher, forwarder = Publisher(2), Forwarder()
        >>> for receiver in range(2):
        ...     forwarder.follow(receiver, publisher.boards(receiver))
        >>> publisher.publish([Update(None, {"policy": {"weight": torch.zeros(3)}})], version=1)
        >>> [(each.receiver, each.version) for each in forwarder.take()], list(forwarder.take())
        ([(None, 1)], [])
    """

    def __init__(self) -> None:
        self._boards: dict[int | None, Board] = {}
        self._taken: dict[int | None, int] = {}  # stamps

    def follow(self, receiver: int, boards: Sequence[Board]) -> None:
        """Take for a receiver, too, from its boards: the common one, and its own."""
        common, own = boards
        self._boards |= {None: common, receiver: own}
        self._taken.pop(receiver, None)

    def take(self, copies: Copies | None = None) -> Iterator[Forwarded]:
        """Publications that were not taken before, the earlier one first; each is whole.

        Args:
            copies: made so far by forwarders that follow the same boards for other receivers. What several take is
                copied once.
        """
        copies = {} if copies is None else copies
        for receiver, board in sorted(self._boards.items(), key=lambda item: item[1].stamp):
            since, stamp = self._taken.get(receiver, 0), board.stamp
            if stamp > since:
                key = receiver, since, stamp
                found = copies[key] = copies.get(key) or _copy(board, since)
                if found is not None:
                    self._taken[receiver], version, models = found
                    yield Forwarded(receiver, version, models)


def _copy(board: Board, since: int) -> _Found | None:
    models: dict[str, Any] = {}

    def copy(publication: Publication) -> None:
        models.clear()
        for model_id, weights in publication.models.items():
            if weights.stamp > since:
                models[model_id] = {name: each.clone() for name, each in weights.tensors.items()}, dict(weights.extras)

    found = board.take({}, copy)
    return None if found is None else (found.stamp, found.version, models)
