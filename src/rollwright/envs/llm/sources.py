"""DatasetSource and QuerySource: prompts of a dataset, or given one by one, and which of them were delivered."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollwright.data.llm.turns import Origin
from rollwright.envs.llm.core import Opening, PromptDraw, PromptSource
from rollwright.envs.llm.readers import Read, Row, RowReader, reader_of
from rollwright.errors import EnvError

_ENTRIES = ("seed", "repeats", "shard", "position", "delivered", "reader")  # of a state

NO_QUERY = (
    "query: expected a prompt, got none. Give one for each environment, env.reset(TensorDict({'query': ['2 + 2?']}, "
    "[1])); or prompts for a collector, env.add_queries(['2 + 2?', ...]); or make the environment with "
    "ChatEnv.from_dataloader(rows, ...)."
)


class DatasetSource(PromptSource):
    """Hands out the rows of a dataset, each ``repeats`` times, and remembers which of them were delivered.

    The state is the place below which every prompt was delivered, and what was delivered above it. A source that loads
    it draws the rest, in the same order: nothing is lost and nothing comes twice, whatever was in progress. Of a group
    that was delivered in part, the missing repeats are drawn again.

    It may be used by several threads.

    Args:
        dataset: one of

            - a map-style dataset (``__len__`` and ``__getitem__``): a list of rows, a dataset of ``datasets``, ...
            - an iterable, or a function without arguments that returns one. After a load it is read again up to the
              place, so it should give the same rows each time.
            - a stateful dataloader, with ``state_dict`` and ``load_state_dict``
            - the path of a file with one JSON object a line

            Its rows are mappings; a string stands for ``{text_key: string}``, a tensor for ``{"tokens": tensor}``.
        repeats: conversations that begin with each prompt: the size of a group.
        epochs: how often the dataset is read; None: without an end, but an iterator only once.
        shuffle: in each epoch another order, made of the seed; for map-style datasets.
        seed: of order and origins; :meth:`set_seed` replaces it.
        interleave: prompts that take turns: with 2, the first repeats of two prompts are drawn, then their second
            repeats, and so on. 1: the repeats of a prompt follow each other.
        batched: items of the dataset are batches, mappings of columns of one length or lists of rows. None: where it
            has a ``batch_size``, as dataloaders have.
        text_key: see ``dataset``.

    Raises:
        ValueError: the dataset is empty, or an argument is out of range.
        TypeError: ``dataset`` is something else.

    Example:
        >>> source = DatasetSource([{"text": "one"}, {"text": "two"}], repeats=2, epochs=1)
        >>> draws = [source.draw() for _ in range(3)]
        >>> [(draw.row["text"], draw.origin.repeat) for draw in draws]
        [('one', 0), ('one', 1), ('two', 0)]
        >>> source.delivered(draws[1].origin)
        >>> restored = DatasetSource([{"text": "one"}, {"text": "two"}], repeats=2, epochs=1)
        >>> restored.load_state_dict(source.state_dict())
        >>> [(draw.row["text"], draw.origin.repeat) for draw in (restored.draw(), restored.draw())]
        [('one', 0), ('two', 0)]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        repeats: int = 1,
        epochs: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        interleave: int = 1,
        batched: bool | None = None,
        text_key: str = "text",
    ) -> None:
        for name, value in (("repeats", repeats), ("epochs", epochs), ("interleave", interleave)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: expected at least 1, got {value!r}.")
        self._reader = reader_of(dataset, epochs=epochs, shuffle=shuffle, batched=batched, key=text_key)
        self.repeats, self.interleave = repeats, interleave
        self._lock = threading.Lock()
        self._seed, self._index, self._count = seed, 0, 1
        self._begin(0)
        self._reader.restart(seed)

    def _begin(self, position: int) -> None:
        self._low = self._next = position
        self._ahead: deque[PromptDraw] = deque()
        self._delivered: dict[int, set[int]] = {}  # repeats, by position; none below _low
        self._before: dict[int, int] = {}  # how many of a group were delivered before the load
        self._claimed: set[tuple[int, int]] = set()
        self._drawn = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    @property
    def seed(self) -> int:
        """Of order and origins."""
        return self._seed

    def draw(self) -> PromptDraw:
        """The next prompt."""
        with self._lock:
            self._drawn = True
            while not self._ahead:
                self._look_ahead()
            return self._ahead.popleft()

    def _look_ahead(self) -> None:
        rounds: list[list[PromptDraw]] = [[] for _ in range(self.repeats)]
        self._next = max(self._next, self._low)  # after a load, what was claimed may be delivered before it is passed
        for turn in range(self.interleave):
            position = self._next
            try:
                epoch, index, row = self._reader.read(position)
            except StopIteration:
                if not turn:
                    raise
                break
            self._next += self._count
            done = self._delivered.get(position, ())
            for repeat in range(self.repeats):
                if repeat not in done and (position, repeat) not in self._claimed:
                    rounds[repeat].append(PromptDraw(Origin(index, epoch, repeat, position, self._seed), row))
        for draws in rounds:
            self._ahead.extend(draws)

    def claim(self, origin: Origin) -> None:
        """The conversation from ``origin`` was saved and goes on: it is not drawn again; after a load."""
        with self._lock:
            self._check(origin)
            self._claimed.add((origin.group, origin.repeat))
            self._ahead = deque(draw for draw in self._ahead if draw.origin != origin)

    def group_size(self, origin: Origin) -> int:
        """Conversations of the group of ``origin`` that were not delivered before the last load."""
        return self.repeats - self._before.get(origin.group, 0)

    def undelivered(self) -> Iterator[tuple[int, int]]:
        """Group and repeat of all conversations that were not delivered, in the order of the data, without an end."""
        for group in itertools.count(self._low, self._count):
            done = self._delivered.get(group, ())
            yield from ((group, repeat) for repeat in range(self.repeats) if repeat not in done)

    def delivered(self, origin: Origin) -> None:
        """The conversation from ``origin`` has reached the consumer, whole; or it was dropped on purpose."""
        with self._lock:
            if origin.seed != self._seed or origin.group < self._low:
                return
            self._check(origin)
            self._delivered.setdefault(origin.group, set()).add(origin.repeat)
            while len(self._delivered.get(self._low, ())) == self.repeats:
                del self._delivered[self._low]
                self._before.pop(self._low, None)
                self._claimed -= {(self._low, repeat) for repeat in range(self.repeats)}
                self._low += self._count
            self._next = max(self._next, self._low)  # after a load, more may be delivered than was drawn
            self._reader.forget_before(self._low)

    def _check(self, origin: Origin) -> None:
        if origin.group % self._count != self._index or not 0 <= origin.repeat < self.repeats:
            raise ValueError(
                f"origin: {origin} is not of this source, which has repeats 0 to {self.repeats - 1} of each "
                f"{self._count}-th group from {self._index} on. Pass origins that it gave."
            )

    def shard(self, index: int, count: int) -> None:
        """Hand out each ``count``-th group only, from ``index`` on; before the first draw."""
        if not 0 <= index < count:
            raise ValueError(f"index: expected 0 to {count - 1}, of count {count}, got {index}.")
        if self._drawn:
            raise RuntimeError("shard: a prompt was drawn before. Divide a new source.")
        self._index, self._count = index, count
        self._begin(index)

    def set_seed(self, seed: int) -> None:
        """See :meth:`PromptSource.set_seed`; after the first draw the data begins again, if it can be read again."""
        with self._lock:
            self._seed = seed
            if self._reader.restart(seed):
                self._begin(self._index)
            else:
                self._ahead = deque(replace(draw, origin=replace(draw.origin, seed=seed)) for draw in self._ahead)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, of numbers and lists, and what a stateful dataloader saves of itself."""
        with self._lock:
            return {
                "seed": self._seed,
                "repeats": self.repeats,
                "shard": [self._index, self._count],
                "position": self._low,
                "delivered": [[position, sorted(repeats)] for position, repeats in sorted(self._delivered.items())],
                "reader": self._reader.state_dict(),
            }

    def divided(self, states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """Places of ``count`` parts of the data, behind all that was delivered of the parts that it had before."""
        before = {state["shard"][0]: state for state in states}
        if sorted(before) != list(range(len(states))) or any(state["shard"][1] != len(states) for state in states):
            raise ValueError(f"states: expected those of all parts, got {[state['shard'] for state in states]}.")
        every = set(range(self.repeats))
        ahead = {position: set(repeats) for state in states for position, repeats in state["delivered"]}
        lowest = min(state["position"] for state in states)  # all before it is delivered
        highest = max(state["position"] for state in states)
        for position in range(lowest, highest):
            if position < before[position % len(states)]["position"]:
                ahead[position] = every
        reader = min((state["reader"] for state in states), key=lambda saved: saved.get("position", 0))
        parts = []
        for index in range(count):
            low = lowest + (index - lowest) % count
            while ahead.get(low) == every:
                low += count
            mine = [[p, sorted(ahead[p])] for p in sorted(ahead) if p >= low and p % count == index]
            found = {"shard": [index, count], "position": low, "delivered": mine, "reader": reader}
            parts.append({"seed": states[0]["seed"], "repeats": self.repeats, **found})
        return parts

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`PromptSource.check_state`.

        Raises:
            KeyError: entries are missing.
            ValueError: the state is of other repeats, or of another dataset.
        """
        missing = [name for name in _ENTRIES if name not in state_dict]
        if missing:
            raise KeyError(f"state_dict: expected {missing} among its entries, got {sorted(state_dict)}.")
        if state_dict["repeats"] != self.repeats:
            raise ValueError(
                f"repeats: the saved place has {state_dict['repeats']}, this source has {self.repeats}. Make it with "
                f"repeats={state_dict['repeats']}, or begin without the place."
            )
        self._reader.check_state(state_dict["reader"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`PromptSource.load_state_dict`; as with :meth:`check_state`, where it raises nothing was loaded."""
        self.check_state(state_dict)
        index, count = state_dict["shard"]
        delivered = {position: set(repeats) for position, repeats in state_dict["delivered"]}
        with self._lock:
            self._seed = state_dict["seed"]
            self._reader.restart(self._seed)
            self._reader.load_state_dict(state_dict["reader"])
            self._index, self._count = index, count
            self._begin(state_dict["position"])
            self._delivered = delivered
            self._before = {position: len(repeats) for position, repeats in self._delivered.items()}


class QuerySource(DatasetSource):
    """Hands out prompts that were added, each once; the data is over where all were drawn.

    Example:
        >>> source = QuerySource()
        >>> source.add([{"query": "2 + 2?"}])
        >>> source.draw().row
        {'query': '2 + 2?'}
    """

    def __init__(self) -> None:
        self._queries = _Queries()
        super().__init__(self._queries)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, to be drawn in their order."""
        with self._lock:
            for row in rows:
                self._queries.add(row)

    def give(self, row: Row, read: Callable[[PromptDraw], Opening]) -> Opening:
        """How a conversation begins by a row of one's own, which nobody else draws once it is claimed.

        Args:
            row: the prompt.
            read: reads it; where it raises, the row is not added.
        """
        with self._lock:
            if self._count > 1:
                raise EnvError("query: this environment shares its data with others. Add queries before they begin.")
            position = self._queries.add(row)
            try:
                return read(PromptDraw(Origin(position, 0, 0, position, self._seed), row))
            except BaseException:
                self._queries.remove_last()
                raise


class _Queries(RowReader):
    """Reads rows that were added, in their order."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._next = 0

    def add(self, row: Row) -> int:
        """Add a row; returns its position."""
        self._rows[self._next] = row
        self._next += 1
        return self._next - 1

    def remove_last(self) -> None:
        """Take out the row that was added last."""
        self._next -= 1
        del self._rows[self._next]

    def read(self, position: int) -> Read:
        """The row at a position; positions are asked for in rising order."""
        if not self._next:
            raise EnvError(NO_QUERY)
        if position not in self._rows:
            raise StopIteration
        return Read(0, position, self._rows[position])

    def restart(self, seed: int) -> bool:
        """See :meth:`RowReader.restart`: what was delivered is not asked again."""
        return False

    def forget_before(self, position: int) -> None:
        """Positions before this one are not asked for again."""
        for old in [place for place in self._rows if place < position]:
            del self._rows[old]

    def state_dict(self) -> dict[str, Any]:
        """What it takes to read again from the position of the last :meth:`forget_before`."""
        return {"next": self._next, "rows": [[place, dict(row)] for place, row in self._rows.items()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state, which :meth:`check_state` has passed."""
        self._next = state_dict["next"]
        self._rows = dict(state_dict["rows"])
