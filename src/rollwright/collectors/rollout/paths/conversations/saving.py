"""Saved state of conversations in slots, and of their turns that were not taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rollwright._warnings import warn_user
from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog, own
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.turns import Origin
from rollwright.envs.checkpoint.packed import packed, unpacked
from rollwright.envs.llm.core import Conversations, Opening
from rollwright.envs.llm.undelivered import Undelivered

__all__ = [
    "Mark",
    "Names",
    "before_answer",
    "check_rows",
    "delivered_in_parts",
    "end_in_parts",
    "latest",
    "line_of_lost",
    "load",
    "packed_dialog",
    "save",
    "warn_of_parts",
]


def packed_dialog(dialog: Dialog, conversations: Conversations) -> torch.Tensor:
    """A conversation between an outcome and an answer, or at its end.

    Raises:
        Exception: of any kind: the environment cannot save it.
    """
    if dialog.pending is None:
        return packed(dialog.state_dict(conversations.state(dialog.slot)))
    return packed(dialog.state_dict(conversations.ended_state(dialog.slot)))


def before_answer(dialog: Dialog, conversations: Conversations) -> dict[str, Any] | None:
    """A conversation whose last answer was not taken, or not asked for; None: it can only begin again."""
    if dialog.pending is not None:
        return dialog.before
    try:
        return dialog.state_dict(conversations.state(dialog.slot))
    except Exception:  # the environment may fail in any way
        return None


def latest(dialog: Dialog, conversations: Conversations) -> torch.Tensor | None:
    """The same, packed."""
    found = before_answer(dialog, conversations)
    return None if found is None else packed(found)


def delivered_in_parts(dialogs: Dialogs, among: Iterable[Dialog]) -> list[Opening]:
    """Of some conversations, those of which turns were taken, where turns are delivered before the end."""
    ahead = Counter(each.opening.draw.origin for row in dialogs.rows for each in row)
    return [dialog.opening for dialog in among if dialog.number > ahead[dialog.opening.draw.origin]]


def line_of_lost(name: str, *, in_parts: bool, reason: object) -> str:
    """What becomes of a conversation that cannot be saved, for people."""
    ends = "turns of it were delivered, and no turn comes twice, so it ends there, and counts as dropped"
    return f"{name}: {ends if in_parts else 'it begins again'}: {reason}"


def save(
    dialogs: Dialogs,
    conversations: list[torch.Tensor],
    source: Mapping[str, Any],
    undelivered: Mapping[str, Any],
    *,
    lost: Collection[Dialog],
    in_parts: bool,
) -> dict[str, Any]:
    """The state of a path.

    Args:
        dialogs: the conversations in its slots.
        conversations: those of them that can be saved, packed.
        source: the place in the data.
        undelivered: what nobody got.
        lost: those that cannot be saved.
        in_parts: whether turns are delivered before their conversation has ended; those that are lost end then.
    """
    gone = {dialog.opening.draw.origin for dialog in lost}
    cut = [opening.draw.origin for opening in delivered_in_parts(dialogs, lost)] if in_parts else []
    return {
        "source": source,
        "dialogs": conversations,
        "rows": packed([[own(each) for each in row if each.opening.draw.origin not in gone] for row in dialogs.rows]),
        **undelivered,
        "cut": packed(cut),
        "dropped": undelivered["dropped"] + len(cut),
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
    source, names = conversations.source, Names(fresh_id)
    source.load_state_dict(state_dict["source"])
    if also := [*state_dict.get("also", ()), *(unpacked(state_dict["cut"]) if "cut" in state_dict else ())]:
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
    _put(dialogs, saved_dialogs, conversations, chain=chain, names=names)


def _put(
    dialogs: Dialogs,
    states: Iterable[Mapping[str, Any]],
    conversations: Conversations,
    *,
    chain: Callable[[], TokenChain],
    names: Names,
) -> None:
    """Put conversations that were saved into their slots."""
    for saved in states:
        dialog = Dialog.loaded(saved, chain())
        dialog.id = names.of(dialog.id)
        dialog.held = [replace(each, id=dialog.id) for each in dialog.held]
        dialogs.slots[dialog.slot] = dialog
        conversations.load(dialog.slot, dialog.opening, dialog.messages, saved["environment"])


class Mark:
    """Where a batch began: conversations in progress, their turns that were not taken, and what nobody got.

    Args:
        dialogs: the slots and rows.
        conversations: of the environment.
        saves: whether conversations in progress are to go on; if not, they begin again.
        in_parts: whether turns are delivered before their conversation has ended. One that cannot be saved then ends,
            with a warning, so that no turn comes twice.
    """

    def __init__(self, dialogs: Dialogs, conversations: Conversations, *, saves: bool, in_parts: bool) -> None:
        self._conversations = conversations
        begun = [dialog for dialog in dialogs if saves and dialog.number]  # the others begin again
        found = {dialog.opening.draw.origin: before_answer(dialog, conversations) for dialog in begun}
        unsaved = {origin for origin, state in found.items() if state is None}
        self._states = {origin: state for origin, state in found.items() if state is not None}
        self._rows = [[each for each in row if each.opening.draw.origin not in unsaved] for row in dialogs.rows]
        parts = delivered_in_parts(dialogs, begun) if in_parts else []
        self._in_parts = {opening.draw.origin for opening in parts}
        self._cut = [opening for opening in parts if opening.draw.origin in unsaved]
        self._ends: set[Origin] = set()
        undelivered = dialogs.undelivered
        self._ended, self._again = undelivered.openings, list(undelivered.again)

    def begun_again(self, dialogs: Dialogs) -> tuple[list[Opening], list[Opening]]:
        """Of the conversations that are there: those that may begin again, and those that were delivered in part."""
        found = {opening.draw.origin: opening for opening in (*self._again, *dialogs.openings())}
        cut = [opening for origin, opening in found.items() if origin in self._in_parts]
        return [opening for origin, opening in found.items() if origin not in self._in_parts], cut

    def go_back(self, dialogs: Dialogs, taken: Iterable[Opening], chain: Callable[[], TokenChain]) -> None:
        """Put slots and rows back to where they were; what was begun since then begins again.

        Args:
            dialogs: the slots and rows.
            taken: of the turns of the batch that nobody gets.
            chain: makes the tokens of a conversation.
        """
        undelivered = dialogs.undelivered
        ended = [at for number, at in undelivered.openings.items() if number not in self._ended]
        since = [*self._again, *taken, *ended, *dialogs.openings(), *undelivered.again]
        cut, self._cut = self._cut, []  # once, however often it goes back
        self._ends |= {opening.draw.origin for opening in cut}
        kept = {*self._ends, *self._states, *(each.opening.draw.origin for row in self._rows for each in row)}
        self._conversations.clear()
        dialogs.clear()
        undelivered.go_back(self._ended)
        undelivered.again.clear()
        undelivered.begin_again(opening for opening in since if opening.draw.origin not in kept)
        end_in_parts(undelivered, cut)
        for row, turns in zip(dialogs.rows, self._rows, strict=True):
            row.extend(turns)
        _put(dialogs, self._states.values(), self._conversations, chain=chain, names=Names(None))
        dialogs.vacate()


def end_in_parts(undelivered: Undelivered, openings: Collection[Opening]) -> None:
    """End conversations that were delivered in part and cannot go on after an error; warns of them."""
    if openings:
        undelivered.drop(openings)
        warn_of_parts(undelivered.names(openings))


def warn_of_parts(names: Sequence[str]) -> None:
    """Warn of conversations that have ended, because they were delivered in part and cannot go on after an error."""
    warn_user(
        f"{', '.join(names)}: turns of it were delivered, it cannot go on after an error, since its environment or its "
        "tools cannot be saved midway, and no turn comes twice: it has ended, and counts as dropped. Give its "
        "environment state_dict() and load_state_dict(), or collect whole conversations (trajs_per_batch).",
        RuntimeWarning,
    )


class Names:
    """New ids for saved ones, each the same wherever it stands; or the saved ones."""

    def __init__(self, fresh: Callable[[], int] | None) -> None:
        self._fresh, self._known = fresh, {-1: -1}

    def of(self, number: int) -> int:
        """The id that a saved one has now."""
        if self._fresh is None:
            return number
        if number not in self._known:
            self._known[number] = self._fresh()
        return self._known[number]
