"""Transcript: tokens, text and messages of a conversation, kept once; turns are marks in it."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import torch

Message = Mapping[str, Any]
T = TypeVar("T")


class Part(Sequence[T]):
    """The first items of a list that only grows: a view, which later items leave as it is.

    It is pickled as a tuple, and its copies are views, too.

    Example:
        >>> items = [1, 2]
        >>> part = Part(items, 2)
        >>> items.append(3)
        >>> list(part), part[-1], len(part)
        ([1, 2], 2, 2)
    """

    __slots__ = ("_items", "_stop")

    def __init__(self, items: list[T], stop: int) -> None:
        self._items, self._stop = items, stop

    def __len__(self) -> int:
        return self._stop

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._items[place] for place in range(*index.indices(self._stop))]
        return self._items[range(self._stop)[index]]

    def __iter__(self) -> Iterator[T]:
        return itertools.islice(self._items, self._stop)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | tuple | Part) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def __deepcopy__(self, memo: Any) -> Part[T]:
        return self

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


class Text(Part[str]):
    """The first pieces of a text that only grows; ``str()`` joins them."""

    __slots__ = ()

    def __str__(self) -> str:
        return "".join(self)

    def __reduce__(self) -> Any:
        return str, (str(self),)


class Growth(NamedTuple):
    """What a transcript has more than before.

    Attributes:
        start: number of tokens, pieces of text, and messages before.
        tokens: int64 ``[new]``.
        texts: pieces.
        messages: as they are.
    """

    start: tuple[int, int, int]
    tokens: torch.Tensor
    texts: Sequence[str]
    messages: Sequence[Message]


class Transcript:
    """Tokens, text and messages of a conversation, each a memory that only grows.

    What was read of it stays valid, and is never overwritten: tokens are views, of text and messages there are
    :class:`Part`. It is pickled once, however many turns in one pickle refer to it.

    Args:
        tokens: to begin with, int64 ``[tokens]``; they are not copied, until others follow.
        texts: pieces of text, which are decoded from tokens elsewhere.
        messages: of the conversation.

    Attributes:
        texts: pieces so far.
        messages: so far.
        final: how many tokens, pieces and messages are of turns that are complete; all that is pickled.

    Example:
        >>> transcript = Transcript(torch.tensor([5, 6]), ["Hi"])
        >>> before = transcript.mark()
        >>> transcript.append([7])
        >>> before.read(), transcript.mark().read()
        (tensor([5, 6]), tensor([5, 6, 7]))
    """

    __slots__ = ("__weakref__", "_memory", "_size", "final", "messages", "texts")

    def __init__(
        self, tokens: torch.Tensor | None = None, texts: Iterable[str] = (), messages: Iterable[Message] = ()
    ) -> None:
        self._memory = torch.empty(0, dtype=torch.int64) if tokens is None else tokens
        self._size = self._memory.shape[0]
        self.texts, self.messages = list(texts), list(messages)
        self.final = (self._size, len(self.texts), len(self.messages))

    @classmethod
    def reserved(cls, room: int) -> Transcript:
        """An empty one with room for some tokens."""
        made = cls(torch.empty(room, dtype=torch.int64))
        made._size, made.final = 0, (0, 0, 0)
        return made

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._size

    @property
    def text(self) -> str:
        """Of all tokens so far."""
        return "".join(self.texts)

    def tokens(self, stop: int) -> torch.Tensor:
        """The first tokens, int64 ``[stop]``: a view."""
        return self._memory[:stop]

    def append(self, tokens: torch.Tensor | list[int]) -> None:
        """Add tokens."""
        size = self._size + len(tokens)
        if size > len(self._memory):
            memory = torch.empty(max(size, 2 * len(self._memory)), dtype=torch.int64)
            memory[: self._size] = self._memory[: self._size]  # earlier views keep the memory that they are of
            self._memory = memory
        if len(tokens):
            values = tokens if isinstance(tokens, torch.Tensor) else torch.tensor(tokens, dtype=torch.int64)
            self._memory[self._size : size] = values
        self._size = size

    def mark(self) -> Mark:
        """How far it has got."""
        return Mark(self, self._size, len(self.texts), len(self.messages))

    def since(self, start: tuple[int, int, int]) -> Growth:
        """What of complete turns came behind ``start``."""
        tokens, texts, messages = self.final
        new = self._memory[start[0] : tokens]
        return Growth(start, new, self.texts[start[1] : texts], self.messages[start[2] : messages])

    def grow(self, growth: Growth) -> None:
        """Add what :meth:`since` gave of another one; what is here already is left out.

        Raises:
            ValueError: something before it is missing.
        """
        here = (self._size, len(self.texts), len(self.messages))
        left_out = [have - start for have, start in zip(here, growth.start, strict=True)]
        if min(left_out) < 0:
            raise ValueError(f"growth: expected what follows {here} tokens, texts and messages, got {growth.start}.")
        self.append(growth.tokens[left_out[0] :])
        self.texts.extend(growth.texts[left_out[1] :])
        self.messages.extend(growth.messages[left_out[2] :])
        self.final = (self._size, len(self.texts), len(self.messages))

    def __reduce__(self) -> Any:
        growth = self.since((0, 0, 0))
        return Transcript, (growth.tokens.clone(), growth.texts, growth.messages)


class Mark(NamedTuple):
    """A place in a transcript: what comes before it.

    Attributes:
        transcript: that it is in.
        tokens: number before it.
        texts: pieces before it.
        messages: number before it.
    """

    transcript: Transcript
    tokens: int
    texts: int
    messages: int

    def read(self) -> torch.Tensor:
        """The tokens before it, int64 ``[tokens]``: a view."""
        return self.transcript.tokens(self.tokens)

    @property
    def text(self) -> Text:
        """The text before it."""
        return Text(self.transcript.texts, self.texts)

    @property
    def chat(self) -> Part[Message]:
        """The messages before it."""
        return Part(self.transcript.messages, self.messages)

    def settle(self) -> None:
        """What comes before it is complete."""
        before = self.transcript.final
        self.transcript.final = (
            max(before[0], self.tokens),
            max(before[1], self.texts),
            max(before[2], self.messages),
        )


class SentGrowth(NamedTuple):
    """What is sent of a transcript.

    Attributes:
        sender: who sends it.
        number: of the transcript; no two of a sender share one.
        growth: since it was sent last.
        gone: numbers of transcripts of which nothing more will come.
    """

    sender: str
    number: int
    growth: Growth
    gone: Sequence[int]


class SentTranscripts:
    """Knows how much of each transcript was sent, so that only what is new is sent again."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._sent: weakref.WeakKeyDictionary[Transcript, tuple[int, tuple[int, int, int]]] = (
            weakref.WeakKeyDictionary()
        )
        self._now: dict[Transcript, tuple[int, tuple[int, int, int]]] = {}  # of the message that is being made
        self._gone: list[int] = []
        self._num_gone = 0  # of them, those that the message says

    def begin(self) -> None:
        """A message is made; what another one has said that was never finished is said again."""
        self._now, self._num_gone = {}, len(self._gone)

    def growth(self, transcript: Transcript) -> SentGrowth:
        """What is new of a transcript, for the message."""
        known = self._sent.get(transcript)
        if known is None:
            known = self._sent[transcript] = next(self._numbers), (0, 0, 0)
            weakref.finalize(transcript, self._gone.append, known[0]).atexit = False
        number, start = known
        gone = () if self._now else tuple(self._gone[: self._num_gone])
        self._now[transcript] = number, transcript.final
        return SentGrowth(self._name, number, transcript.since(start), gone)

    def finish(self) -> None:
        """The message is complete, and will be sent."""
        if self._now:
            del self._gone[: self._num_gone]
        self._sent.update(self._now)
        self._now = {}


class ReceivedTranscripts:
    """The transcripts that another process sends, and goes on sending."""

    def __init__(self) -> None:
        self._sender: str | None = None
        self._known: dict[int, Transcript] = {}

    def grown(self, sent: SentGrowth) -> Transcript:
        """A transcript with what was sent of it; the same growth may be taken in again.

        Raises:
            ValueError: what was sent before is missing.
        """
        if sent.sender != self._sender:  # another process, in the place of one that is gone
            self._sender, self._known = sent.sender, {}
        for number in sent.gone:
            self._known.pop(number, None)
        transcript = self._known.get(sent.number)
        if transcript is None:
            transcript = self._known[sent.number] = Transcript()
        transcript.grow(sent.growth)
        return transcript
