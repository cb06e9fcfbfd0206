"""Conversations in progress of some workers, divided among another number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollwright.collectors.rollout.paths.conversations.dialogs import EndedTurn
from rollwright.data.llm.turns import Origin
from rollwright.envs.checkpoint.packed import packed, unpacked
from rollwright.envs.llm.core import Opening

__all__ = ["divided", "place_in"]


def divided(
    states: Sequence[Mapping[str, Any]], sources: Sequence[Mapping[str, Any]], *, num_rows: int, num_slots: int
) -> list[dict[str, Any]]:
    """The states of as many workers as there are ``sources``: each goes on with the conversations of its groups.

    Args:
        states: of all workers before, whose turns were delivered as they came.
        sources: places in the data of the workers that go on.
        num_rows: of a batch.
        num_slots: of an environment.

    Raises:
        ValueError: a worker would have more conversations in progress than its environment has room for.
    """
    found = [_Part(source, num_rows) for source in sources]
    found[0].num_dropped = sum(state["dropped"] for state in states)
    for state in states:
        dialogs = {saved["slot"]: saved for saved in map(unpacked, state["dialogs"])}
        for saved in dialogs.values():
            _of(found, saved["opening"]).dialogs.append(saved)
        for row in unpacked(state["rows"]):
            for turn in row:
                _of(found, turn.opening).turns.append(turn)
        for opening in unpacked(state["again"]):
            _of(found, opening).again.append(opening)
        for origin in unpacked(state["cut"]) if "cut" in state else ():
            found[origin.group % len(found)].cut.append(origin)
        for number, opening in unpacked(state["undelivered"]).items():
            _of(found, opening).undelivered[number] = opening
    most = max(len(part.dialogs) for part in found)
    if most > num_slots:
        raise ValueError(
            f"{most} conversations in progress would be one worker's, whose environment has room for {num_slots}. Load "
            f"into as many workers as were saved ({len(states)}), or into environments of batch_size={most}."
        )
    started = any(state["row_ids"] is not None for state in states)
    return [part.state(started) for part in found]


def place_in(source: Mapping[str, Any], num_rows: int, num_dropped: int = 0) -> dict[str, Any]:
    """The state of a path of which nothing is kept but the place in the data, and how many were dropped on purpose."""
    return {
        "source": source,
        "dialogs": [],
        "rows": packed([[] for _ in range(num_rows)]),
        "row_ids": None,
        "undelivered": packed({}),
        "again": packed([]),
        "cut": packed([]),
        "dropped": num_dropped,
    }


class _Part:
    """What one worker goes on with."""

    def __init__(self, source: Mapping[str, Any], num_rows: int) -> None:
        self._source, self._num_rows = source, num_rows
        self.dialogs: list[dict[str, Any]] = []
        self.turns: list[EndedTurn] = []
        self.again: list[Any] = []
        self.undelivered: dict[int, Any] = {}
        self.cut: list[Origin] = []
        self.num_dropped = 0

    def state(self, started: bool) -> dict[str, Any]:
        """As one path saves it."""
        rows: list[list[EndedTurn]] = [[] for _ in range(self._num_rows)]
        slots = {saved["id"]: slot for slot, saved in enumerate(self.dialogs)}
        over = [turn for turn in self.turns if turn.id not in slots]
        names = {name: number for number, name in enumerate(dict.fromkeys(turn.id for turn in over))}
        for turn in over:  # before those of the conversation that goes on in the row
            rows[names[turn.id] % self._num_rows].append(turn)
        for turn in self.turns:
            if turn.id in slots:
                rows[slots[turn.id] % self._num_rows].append(turn)
        return {
            **place_in(self._source, self._num_rows, self.num_dropped),
            "dialogs": [packed({**saved, "slot": slot}) for slot, saved in enumerate(self.dialogs)],
            "rows": packed(rows),
            "row_ids": torch.full((self._num_rows,), -1, device="cpu") if started else None,
            "again": packed(self.again),
            "cut": packed(self.cut),
            "undelivered": packed(self.undelivered),
        }


def _of(parts: list[_Part], opening: Opening) -> _Part:
    return parts[opening.draw.origin.group % len(parts)]
