"""Saved state of conversations in slots, and of their turns that were not taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog, own
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs
from rollwright.data.llm.chain import TokenChain
from rollwright.envs.checkpoint.packed import packed, unpacked
from rollwright.envs.llm.core import Conversations, Opening

__all__ = ["check_rows", "latest", "load", "packed_dialog", "packed_or_none", "save"]


def packed_dialog(dialog: Dialog, conversations: Conversations) -> torch.Tensor:
    """A conversation between an outcome and an answer, or at its end.

    Raises:
        Exception: of any kind: the environment cannot save it.
    """
    if dialog.pending is None:
        return packed(dialog.state_dict(conversations.state(dialog.slot)))
    return packed(dialog.state_dict(conversations.ended_state(dialog.slot)))


def packed_or_none(dialog: Dialog, conversations: Conversations) -> torch.Tensor | None:
    """The same; None: the environment cannot save it."""
    try:
        return packed_dialog(dialog, conversations)
    except Exception:  # the environment may fail in any way
        return None


def latest(dialog: Dialog, conversations: Conversations) -> torch.Tensor | None:
    """A conversation, without a wait for what follows its last answer; None: it can only begin again."""
    if dialog.asked or dialog.pending is not None:
        return dialog.before
    return packed_or_none(dialog, conversations)


def save(
    dialogs: Dialogs, conversations: list[torch.Tensor], source: Mapping[str, Any], undelivered: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a path.

    Args:
        dialogs: the conversations in its slots.
        conversations: those of them that can be saved, packed.
        source: the place in the data.
        undelivered: what nobody got.
    """
    return {
        "source": source,
        "dialogs": conversations,
        "rows": packed([[own(each) for each in row] for row in dialogs.rows]),
        **undelivered,
    }


def check_rows(state_dict: Mapping[str, Any], dialogs: Dialogs) -> None:
    """Test that a state is of as many rows.

    Raises:
        ValueError: it was saved with another number of environments, or another ``async_envs``.
    """
    sizes = len(unpacked(state_dict["rows"])), len(dialogs.rows)
    if sizes[0] != sizes[1]:
        saved, own_rows = (
            "async_envs=True, or one environment" if number == 1 else f"{number} environments that take turns"
            for number in sizes
        )
        raise ValueError(
            f"state_dict: it was saved with {saved}, and this collector has {own_rows}. Make it with the same "
            "batch_size of the environment, and the same async_envs."
        )


def load(
    state_dict: Mapping[str, Any],
    dialogs: Dialogs,
    conversations: Conversations,
    *,
    chain: Callable[[], TokenChain],
    fresh_id: Callable[[], int] | None,
) -> None:
    """Go on from a saved state, in slots and rows that are empty.

    Args:
        state_dict: of :func:`save`.
        dialogs: the slots and rows.
        conversations: of the environment.
        chain: makes the tokens of a conversation.
        fresh_id: hands out other trajectory ids than those that were saved; None: these are free.
    """
    source, names = conversations.source, _Names(fresh_id)
    source.load_state_dict(state_dict["source"])
    if also := state_dict.get("also"):
        for origin in also:
            source.delivered(origin)
        source.load_state_dict(source.state_dict())  # groups are as large as what is left of them
    for row, turns in zip(dialogs.rows, unpacked(state_dict["rows"]), strict=True):
        row.extend(replace(each, id=names.of(each.id)) for each in turns)
    dialogs.undelivered.load_state_dict(state_dict, names.of)
    saved_dialogs = [saved for saved in map(unpacked, state_dict["dialogs"]) if saved["slot"] < len(dialogs.slots)]
    ended = [each.opening for row in dialogs.rows for each in row if each.ended is not None]
    openings: list[Opening] = [*ended, *(saved["opening"] for saved in saved_dialogs)]
    for opening in openings:
        source.claim(opening.draw.origin)
    for saved in saved_dialogs:
        dialog = Dialog.loaded(saved, chain())
        dialog.id = names.of(dialog.id)
        dialog.held = [replace(each, id=dialog.id) for each in dialog.held]
        dialogs.slots[dialog.slot] = dialog
        conversations.load(dialog.slot, dialog.opening, dialog.messages, saved["environment"])


class _Names:
    """New ids for saved ones, each the same wherever it stands; or the saved ones."""

    def __init__(self, fresh: Callable[[], int] | None) -> None:
        self._fresh, self._known = fresh, {-1: -1}

    def of(self, number: int) -> int:
        if self._fresh is None:
            return number
        if number not in self._known:
            self._known[number] = self._fresh()
        return self._known[number]
