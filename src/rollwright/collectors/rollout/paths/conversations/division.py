"""Conversations in progress of some workers, divided among another number of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollwright.collectors.rollout.paths.conversations.dialogs import EndedTurn
from rollwright.envs.checkpoint import packed, unpacked


def divided(
    states: Sequence[Mapping[str, Any]], count: int, *, sizes: tuple[int, int], in_parts: bool
) -> list[dict[str, Any]]:
    """The states of ``count`` workers, each of which goes on with the conversations of its groups.

    Args:
        states: of all workers before.
        count: of those that go on.
        sizes: rows of a batch, and slots of an environment.
        in_parts: whether turns are delivered as they come; if not, what is in progress begins again.

    Raises:
        ValueError: a worker would have more conversations in progress than its environment has room for.
    """
    parts: list[dict[str, Any]] = [{name: [] for name in ("dialogs", "turns", *_PACKED)} for _ in range(count)]
    for state in states if in_parts else ():
        found = {name: unpacked(state[name]) for name in _PACKED if name in state}
        origins = [
            *(("dialogs", saved, saved["opening"].draw.origin) for saved in map(unpacked, state["dialogs"])),
            *(("turns", turn, turn.opening.draw.origin) for row in unpacked(state["rows"]) for turn in row),
            *(("undelivered", item, item[1].draw.origin) for item in found.pop("undelivered").items()),
            *(("cut", origin, origin) for origin in found.pop("cut", ())),
            *((name, opening, opening.draw.origin) for name in found for opening in found[name]),
        ]
        for name, item, origin in origins:
            parts[origin.group % count][name].append(item)
    most = max(len(part["dialogs"]) for part in parts)
    if most > sizes[1]:
        raise ValueError(
            f"{most} conversations in progress would be one worker's, whose environment has room for {sizes[1]}. Load "
            f"into as many workers as were saved ({len(states)}), or into environments of batch_size={most}."
        )
    started = in_parts and any(state["row_ids"] is not None for state in states)
    dropped = [sum(state["dropped"] for state in states)] + [0] * (count - 1)
    counted = {
        name: dict(sum((Counter(state.get(name, {})) for state in states), Counter[str]()))
        for name in ("failed", "filtered")
    }
    counts = [counted] + [{name: {} for name in counted}] * (count - 1)
    return [
        {
            "dialogs": [packed({**saved, "slot": slot}) for slot, saved in enumerate(part["dialogs"])],
            "rows": packed(_rows(part["turns"], [saved["id"] for saved in part["dialogs"]], sizes[0])),
            "row_ids": torch.full((sizes[0],), -1, device="cpu") if started else None,
            **{name: packed(part[name]) for name in _PACKED},
            "undelivered": packed(dict(part["undelivered"])),
            "dropped": number,
            **reasons,
        }
        for part, number, reasons in zip(parts, dropped, counts, strict=True)
    ]


_PACKED = ("undelivered", "again", "partly", "cut")


def _rows(turns: Sequence[EndedTurn], going_on: Sequence[int], count: int) -> list[list[EndedTurn]]:
    """Turns that were not taken, by row.

    Args:
        turns: of all conversations.
        going_on: ids of the trajectories in slots, whose rows their turns go to, behind those that have ended.
        count: of rows.
    """
    rows: list[list[EndedTurn]] = [[] for _ in range(count)]
    names = list(dict.fromkeys(turn.id for turn in turns if turn.id not in going_on))
    for ids in (names, going_on):
        for turn in turns:
            if turn.id in ids:
                rows[ids.index(turn.id) % count].append(turn)
    return rows
