"""ConversationCursor: what was delivered of conversations, dropped, or begins again; saved, and loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase

from rollwright._warnings import warn_user
from rollwright.collectors.core import DataCursor, TrajectoryIds
from rollwright.data.llm.turns import Origin
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.core import Opening
from rollwright.envs.llm.undelivered import Undelivered


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


class Saved(NamedTuple):
    """Conversations in progress, as they are saved.

    Attributes:
        state: entries of the state.
        lost: those in which something was asked, and which cannot be saved, and why.
        unsaved: what else cannot be saved, for people.
        done: conversations that count as delivered, which the state does not know.
    """

    state: dict[str, Any]
    lost: Sequence[tuple[Opening, str]] = ()
    unsaved: Sequence[str] = ()
    done: Sequence[Origin] = ()


class InProgress(Protocol):
    """Conversations in progress, with their turns that nobody got: what a cursor asks of whoever takes the steps."""

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Rows of a batch and slots, where another number of workers can go on; None: it cannot."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to go on with."""

    @property
    def only_rest(self) -> bool:
        """Whether all that go on have failed, and wait for the next batch."""

    def delivered(self) -> None:
        """A batch has reached the consumer."""

    def begun(self) -> Iterable[Opening]:
        """Conversations in which something was asked, and which go on, or have turns that were not taken."""

    def interrupt(self) -> list[Opening]:
        """Take all out, with the turns of the current batch; returns what nobody got."""

    def go_back(self, mark: Any, *, keeps: bool) -> Iterable[Opening]:
        """Put all back to where a batch began, see :meth:`DataCursor.go_back`; returns what cannot be put back."""

    def look_ahead(self) -> None:
        """Begin what the next rollout begins with, so that :attr:`is_over` says whether there is any."""

    def save(self, *, waits: bool, alone: bool) -> Saved:
        """Save what is in progress.

        Args:
            waits: wait for what is in progress; False: as it was before.
            alone: save nothing but the place in the data.
        """

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise of a state of another make; nothing is changed."""

    def load(self, state_dict: Mapping[str, Any], names: Names, place: Callable[[], None]) -> None:
        """Go on from what :meth:`save` saved.

        Args:
            state_dict: the whole state.
            names: of trajectories.
            place: goes to the place in the data, and takes in what nobody got.
        """


class ConversationCursor(DataCursor):
    """Keeps account of conversations from prompt to delivery; whoever takes their steps has those in progress.

    Args:
        undelivered: the conversations that nobody got.
        ids: hands out trajectory ids.
        delivers_whole: whether complete conversations are delivered, and those that ended are held until then; else
            turns are, as they come.
        progress: those in progress before the first path; turns that they have were taken by hand.
    """

    offers_again = True

    def __init__(
        self,
        undelivered: Callable[[], Undelivered],
        ids: TrajectoryIds,
        *,
        delivers_whole: bool,
        progress: InProgress | None = None,
    ) -> None:
        self._find, self._ids, self._delivers_whole = undelivered, ids, delivers_whole
        self._progress = progress
        self._partly = _by_origin(() if progress is None else progress.begun())  # delivered in part; they go on
        self._taken: dict[Origin, Opening] = {}  # of the turns of the last batch
        self._mark: Any = None  # where the batch began, until it is delivered
        self.keeps_place = False

    @property
    def undelivered(self) -> Undelivered:
        """The conversations that nobody got."""
        return self._find()

    @property
    def progress(self) -> InProgress:
        """The conversations in progress."""
        assert self._progress is not None
        return self._progress

    def fresh_id(self) -> int:
        """The id of a trajectory that begins."""
        return int(self._ids.take(1)[0])

    def follow(self, progress: InProgress) -> None:
        """Another path takes the steps: what is in progress begins again there; what was delivered in part ends."""
        if progress is not self._progress:
            if self._progress is not None:
                self.start_over(warns=False)
            self._progress = progress

    # Batches ------------------------------------------------------------------------------------------

    def begin(self, mark: Any) -> None:
        """A batch begins.

        Args:
            mark: where, for :meth:`InProgress.go_back`; None: after an error all begins again.
        """
        self._mark, self._taken = mark, {}
        self.undelivered.ended({})

    def was_delivered(self, opening: Opening) -> bool:
        """Whether turns of a conversation were delivered, and the rest is to be."""
        return opening.draw.origin in self._partly

    def finish(self, taken: Iterable[Opening], ended: Mapping[int, Opening]) -> None:
        """A batch is complete.

        Args:
            taken: conversations that it has turns of.
            ended: those that have ended in it, by trajectory id.
        """
        self._taken = _by_origin(taken)
        self.undelivered.ended(ended)

    def delivered(self, ids: Iterable[int] | None = None) -> None:
        """Trajectories have reached the consumer, whole."""
        self._partly = self._partly_then()
        self._mark, self._taken = None, {}
        self.undelivered.delivered(ids)
        self.progress.delivered()

    def _partly_then(self) -> dict[Origin, Opening]:
        """Conversations that are delivered in part once the last batch is."""
        known = {} if self._delivers_whole else {**self._partly, **self._taken}
        return {origin: at for origin, at in _by_origin(self.progress.begun()).items() if origin in known}

    def filtered(self, ids: Iterable[int], reason: str) -> None:
        """A complete group of trajectories will not be delivered, and why: on purpose."""
        self.undelivered.filter(ids, reason)

    def dropped(self) -> None:
        """Trajectories that ended and were not delivered never will be: on purpose."""
        self.undelivered.dropped()

    # Nobody gets it -----------------------------------------------------------------------------------

    def go_back(self, *, keeps: bool = True) -> bool:
        """Nobody gets the last batch, or the one in progress: go on from where it began."""
        if self._mark is None:
            return False
        self.undelivered.take_back()
        self._taken = {}
        self.begin_again(self.progress.go_back(self._mark, keeps=keeps))
        return True

    def start_over(self, *, warns: bool = True) -> None:
        """Begin again what nobody got; those that ended in batches before are held, where whole ones are delivered."""
        undelivered = self.undelivered
        ended = [] if self._delivers_whole else undelivered.take(undelivered.openings)
        self._mark, self._taken = None, {}
        self.begin_again([*ended, *self.progress.interrupt()], warns=warns)

    def begin_again(self, openings: Iterable[Opening], *, warns: bool = True) -> None:
        """Begin conversations again; those that were delivered in part end, so that no turn comes twice."""
        found = _by_origin(openings)
        cut = [self._partly.pop(origin) for origin in found if origin in self._partly]
        gone = _by_origin(cut)
        self.undelivered.begin_again(at for origin, at in found.items() if origin not in gone)
        self.undelivered.drop(cut)
        if cut and warns:
            warn_user(
                f"{', '.join(origin.name for origin in gone)}: turns of it were delivered, it cannot go on after an "
                "error, since its environment or its tools cannot be saved midway, and no turn comes twice: it has "
                "ended, and counts as dropped. Give its environment state_dict() and load_state_dict(), or collect "
                "whole conversations (trajs_per_batch).",
                RuntimeWarning,
            )

    def forget(self) -> None:
        """Draw others; nothing begins again."""
        self.progress.interrupt()
        self.undelivered.forget()
        self._mark, self._taken, self._partly = None, {}, {}

    # The place in the data ----------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """Whether there is nothing more to give."""
        return self.progress.is_over

    @property
    def batch_is_over(self) -> bool:  # type: ignore[override]
        """See :attr:`DataCursor.batch_is_over`: also where all that continue have failed."""
        return self.progress.is_over or self.progress.only_rest

    @property
    def versions(self) -> Mapping[Origin, int]:
        """Of the weights when conversations were begun that were not delivered, by where they come from."""
        return self.undelivered.versions

    def look_ahead(self) -> None:
        """Begin what the next rollout begins with, so that :attr:`is_over` says whether there is any."""
        self.progress.look_ahead()

    def keep_place(self) -> None:
        """:meth:`place` is asked for at any time from now on, and what is in progress is kept for it."""
        self.keeps_place = True

    def place(self, ids: Iterable[int] | None = ()) -> dict[str, Any]:
        """See :meth:`DataCursor.place`: of whole conversations, where the data is; of turns, all in progress, too."""
        done, left = self.undelivered.split(ids)
        saved = self.progress.save(waits=False, alone=self._delivers_whole)
        partly = self._partly_then() if ids is None else self._partly
        state = self._state(saved, partly, left, [at.draw.origin for at in done])
        return {**state, **_NOTHING} if self._delivers_whole else state

    def state_dict(self) -> tuple[dict[str, Any], list[str]]:
        """See :meth:`DataCursor.state_dict`; waits for steps, tools and rewards that are in progress."""
        saved = self.progress.save(waits=True, alone=False)
        ends = "turns of it were delivered, and no turn comes twice, so it ends there, and counts as dropped"
        lines = [
            f"the conversation of {at.draw.origin.name}: "
            f"{ends if at.draw.origin in self._partly else 'it begins again'}: {reason}"
            for at, reason in saved.lost
        ]
        return self._state(saved, self._partly), [*saved.unsaved, *lines]

    def _state(
        self,
        saved: Saved,
        partly: Mapping[Origin, Opening],
        ended: Mapping[int, Opening] | None = None,
        done: Sequence[Origin] = (),
    ) -> dict[str, Any]:
        lost = {at.draw.origin for at, _ in saved.lost}
        cut = [origin for origin in partly if origin in lost]
        state = self.undelivered.state_dict(ended)
        return {
            **state,
            **saved.state,
            "cut": packed([*done, *saved.done, *cut]),
            "partly": packed([at for origin, at in partly.items() if origin not in lost]),
            "dropped": state["dropped"] + len(cut),
        }

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise of a state of another make; nothing is changed."""
        self.progress.check_state(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, ids_are_free: bool) -> None:
        """Go on from a saved state."""
        self.forget()
        names = Names(None if ids_are_free else self.fresh_id)
        done: list[Origin] = unpacked(state_dict["cut"]) if "cut" in state_dict else []

        def place() -> None:
            self.undelivered.load_state_dict(state_dict, names.of, delivered=done)

        self._partly = _by_origin(unpacked(state_dict["partly"]) if "partly" in state_dict else ())
        self.progress.load(state_dict, names, place)

    def load_undelivered(self, held: Iterable[tuple[int, TensorDictBase]]) -> None:
        """See :meth:`DataCursor.load_undelivered`: their first frames tell which they are."""
        known = {(at.draw.origin.group, at.draw.origin.repeat): at for at in self.undelivered.openings.values()}
        places = (
            (number, tuple(int(frame.get(key).reshape(-1)[0]) for key in ("group_id", "repeat")))
            for number, frame in held
        )
        self.undelivered.load_ended({number: known[place] for number, place in places if place in known})

    def divided(self, states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """See :meth:`DataCursor.divided`; whole conversations that were not delivered begin again."""
        if (sizes := self.progress.sizes) is None:
            return super().divided(states, count)
        sources = self.undelivered.source.divided([state["source"] for state in states], count)
        parts = _divided(states, count, sizes=sizes, in_parts=not self._delivers_whole)
        return [{"source": source, **part} for source, part in zip(sources, parts, strict=True)]

    def stats(self) -> dict[str, Any]:
        """What a path adds to ``stats()`` of a collector."""
        undelivered, begun = self.undelivered, _by_origin(self.progress.begun())
        left = [*undelivered.openings.values(), *undelivered.again, *begun.values()]
        return {
            "conversations_in_progress": len(begun) + len(undelivered.again),
            "conversations_dropped": undelivered.num_dropped,
            "conversations_failed": undelivered.failed.copy(),
            "groups_filtered": undelivered.filtered.copy(),
            "conversations_undelivered": len(undelivered),
            "conversations_unfinished": undelivered.names(left),
        }


_NOTHING = {"undelivered": packed({}), "again": packed([]), "partly": packed([])}


def _by_origin(openings: Iterable[Opening]) -> dict[Origin, Opening]:
    return {at.draw.origin: at for at in openings}


def _divided(
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


def _rows(turns: Sequence[Any], going_on: Sequence[int], count: int) -> list[list[Any]]:
    """Turns that were not taken, by row.

    Args:
        turns: of all conversations.
        going_on: ids of the trajectories in slots, whose rows their turns go to, behind those that have ended.
        count: of rows.
    """
    rows: list[list[Any]] = [[] for _ in range(count)]
    names = list(dict.fromkeys(turn.id for turn in turns if turn.id not in going_on))
    for ids in (names, going_on):
        for turn in turns:
            if turn.id in ids:
                rows[ids.index(turn.id) % count].append(turn)
    return rows
