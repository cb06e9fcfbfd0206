"""Undelivered: conversations between their prompt and their delivery."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rollwright.data.llm.trace import TraceWriter
from rollwright.data.llm.turns import Origin
from rollwright.envs.checkpoint import packed, unpacked
from rollwright.envs.llm.core import ConversationSlots, DataPlace, Opening
from rollwright.errors import EnvError


class Undelivered:
    """Conversations of an environment that nobody got: they have ended, or are to begin again.

    The place in the data follows what was delivered. Those that have ended are known by the ids of their trajectories,
    or by what else the caller names them with. A conversation that has ended counts when :meth:`delivered` names
    it, or when it was dropped on purpose; what nobody will get begins again, before other prompts are drawn.

    Args:
        conversations: of the environment.

    Attributes:
        again: conversations to begin again.
        num_dropped: conversations that were dropped on purpose, and count as delivered.
        trace: where turns are written, and what becomes of conversations; None: nowhere.
        failed: how many have failed, by class of what was raised.
        filtered: complete groups that were not delivered, on purpose, by reason.
        versions: of the weights, when the first answer was asked for, of conversations that were not delivered.

    Example:
        >>> from rollwright.envs.llm.conversations import DatasetConversations
        >>> from rollwright.envs.llm.sources import DatasetSource
        >>> conversations = DatasetConversations(DatasetSource(["one", "two"], epochs=1), 1)
        >>> undelivered = Undelivered(conversations)
        >>> undelivered.ended({7: undelivered.open(0)})
        >>> undelivered.begin_again(undelivered.take([7]))
        >>> undelivered.open(0).messages
        [{'role': 'user', 'content': 'one'}]
        >>> undelivered.open(0).messages
        [{'role': 'user', 'content': 'two'}]
        >>> conversations.close()
    """

    def __init__(self, conversations: ConversationSlots) -> None:
        self._conversations = conversations
        self.again: deque[Opening] = deque()
        self.num_dropped = 0
        self.trace: TraceWriter | None = None
        self.failed: Counter[str] = Counter()
        self.filtered: Counter[str] = Counter()
        self.versions: dict[Origin, int] = {}
        self._left_out: Counter[int] = Counter()  # conversations by group, of groups that were not delivered
        self._ended: dict[Any, Opening] = {}  # by trajectory id
        self._last: list[Any] = []  # of them, those that ended in the last batch

    @property
    def source(self) -> DataPlace:
        """The place in the data."""
        return self._conversations.source

    def __len__(self) -> int:
        """Conversations that have ended."""
        return len(self._ended)

    @property
    def openings(self) -> dict[Any, Opening]:
        """How the conversations began that have ended, by trajectory id."""
        return dict(self._ended)

    # From prompt to end -------------------------------------------------------------------------------

    def open(self, slot: int) -> Opening:
        """Begin the next conversation in a slot; see :attr:`Opening.error` for one that cannot.

        Raises:
            StopIteration: the data is over.
        """
        for place, opening in enumerate(self.again):
            if self._conversations.takes(slot, opening):
                del self.again[place]
                return self.load(slot, opening)
        return self._conversations.open(slot)

    def load(self, slot: int, opening: Opening) -> Opening:
        """Begin a conversation again."""
        try:
            self._conversations.load(slot, opening, opening.messages, {})
        except EnvError as error:
            return replace(opening, error=error)
        return opening

    def drop(self, openings: Iterable[Opening]) -> None:
        """Conversations in progress end here, on purpose: their prompts count as delivered."""
        for opening in openings:
            self.source.delivered(opening.draw.origin)
            self.versions.pop(opening.draw.origin, None)
            self.num_dropped += 1
            if self.trace is not None:
                self.trace.end(opening.draw.origin, "dropped")

    def leave_out(self, opening: Opening, error: BaseException) -> None:
        """A conversation has failed, and will not be delivered: its group is complete without it."""
        origin = opening.draw.origin
        self.versions.pop(origin, None)
        if self.trace is not None:
            self.trace.end(origin, "failed", str(error))
        self.source.delivered(origin)
        self._left_out[origin.group] += 1
        if not self.group_size(origin):
            del self._left_out[origin.group]

    def group_size(self, origin: Origin) -> int:
        """See :meth:`PromptSource.group_size`; without those that were left out."""
        return self.source.group_size(origin) - self._left_out[origin.group]

    def begin_again(self, openings: Iterable[Opening]) -> None:
        """Nobody will get these conversations; each begins again once.

        Those of earlier groups are first: a group whose reward waits for all of it lets the others go on.
        """
        found = {opening.draw.origin: opening for opening in (*self.again, *openings)}
        self.again = deque(found[origin] for origin in sorted(found, key=lambda origin: (origin.group, origin.repeat)))

    def ended(self, openings: Mapping[Any, Opening]) -> None:
        """A batch is complete.

        Args:
            openings: of the conversations that have ended in it, by trajectory id.
        """
        self._ended.update(openings)
        self._last = list(openings)

    # Delivery -----------------------------------------------------------------------------------------

    def delivered(self, ids: Iterable[Any] | None = None) -> None:
        """Conversations have reached the consumer.

        Args:
            ids: of their trajectories; None: all that ended in the last batch.
        """
        for number in self._last if ids is None else ids:
            opening = self._ended.pop(number, None)
            if opening is not None:
                self.source.delivered(opening.draw.origin)
                self.versions.pop(opening.draw.origin, None)
                self._left_out.pop(opening.draw.origin.group, None)

    def filter(self, ids: Iterable[Any], reason: str) -> None:
        """A complete group will not be delivered; its prompt counts as done.

        Args:
            ids: of its trajectories.
            reason: for people.
        """
        ids = list(ids)
        if self.trace is not None:
            for opening in (self._ended[number] for number in ids if number in self._ended):
                self.trace.end(opening.draw.origin, "filtered", reason)
        self.delivered(ids)
        self.filtered[reason] += 1

    def take(self, ids: Iterable[Any]) -> list[Opening]:
        """Conversations that had ended, which are not among them any more."""
        return [self._ended.pop(number) for number in list(ids) if number in self._ended]

    def dropped(self) -> None:
        """What has ended will not be delivered, on purpose."""
        self.drop(self._ended.values())
        self._ended = {}

    def take_back(self) -> None:
        """Nobody got the last batch: what ended in it has not ended."""
        self.take(self._last)
        self._last = []

    def forget(self) -> None:
        """Draw others: nothing of this is delivered, nor begins again."""
        self.again.clear()
        self.versions.clear()
        self._left_out.clear()
        self._ended, self._last = {}, []

    # State --------------------------------------------------------------------------------------------

    def split(self, ids: Iterable[Any] | None) -> tuple[list[Opening], dict[Any, Opening]]:
        """Conversations that have ended: those that trajectory ids name, as for :meth:`delivered`, and the others."""
        named = set(self._last if ids is None else ids)
        mine = [opening for number, opening in self._ended.items() if number in named]
        return mine, {number: opening for number, opening in self._ended.items() if number not in named}

    def state_dict(self, ended: Mapping[Any, Opening] | None = None) -> dict[str, Any]:
        """The place in the data, and what nobody got.

        Args:
            ended: of the conversations that have ended, those to be saved; None: all.
        """
        return {
            "source": self.source.state_dict(),
            "undelivered": packed(self._ended if ended is None else ended),
            "again": packed(list(self.again)),
            "dropped": self.num_dropped,
            "failed": dict(self.failed),
            "filtered": dict(self.filtered),
        }

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        renamed: Callable[[Any], Any] | None = None,
        *,
        delivered: Collection[Origin] = (),
    ) -> None:
        """Go on from a saved state.

        Args:
            state_dict: of :meth:`state_dict`.
            renamed: new trajectory ids for those that were saved.
            delivered: conversations that count as delivered, whatever the state says.
        """
        self.source.load_state_dict(state_dict["source"])
        for origin in delivered:
            self.source.delivered(origin)
        if delivered:  # groups are as large as what is left of them
            self.source.load_state_dict(self.source.state_dict())
        self.load_again(unpacked(state_dict["again"]), state_dict["dropped"])
        self.failed, self.filtered = (Counter(state_dict.get(name, {})) for name in ("failed", "filtered"))
        self._left_out.clear()  # the source has taken them off the sizes of their groups
        done, ended = {(at.group, at.repeat) for at in delivered}, unpacked(state_dict["undelivered"]).items()
        left = {number: at for number, at in ended if (at.draw.origin.group, at.draw.origin.repeat) not in done}
        self.load_ended(left if renamed is None else {renamed(number): at for number, at in left.items()})

    def load_again(self, openings: Iterable[Opening], num_dropped: int) -> None:
        """Conversations to begin again, and how many were dropped."""
        self.again, self.num_dropped = deque(openings), int(num_dropped)
        self._claim(self.again)

    def load_ended(self, openings: Mapping[Any, Opening]) -> None:
        """Conversations that have ended, by the ids that their trajectories have now."""
        self._ended = dict(openings)
        self._claim(self._ended.values())

    def _claim(self, openings: Iterable[Opening]) -> None:
        for opening in openings:
            self.source.claim(opening.draw.origin)

    @staticmethod
    def names(openings: Iterable[Opening]) -> list[str]:
        """Names of conversations, for people; each once."""
        return [origin.name for origin in dict.fromkeys(opening.draw.origin for opening in openings)]
