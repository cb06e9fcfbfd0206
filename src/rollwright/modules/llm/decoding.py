"""Responses that are being generated side by side: their cache, and their tokens so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rollwright.data.llm.codec import Codec
from rollwright.data.llm.turns import FinishReason, Version
from rollwright.modules.llm.caches import join_rows, select_rows
from rollwright.modules.llm.causal_lm import CausalLM
from rollwright.modules.llm.engine import Completion, Request, Sampling
from rollwright.modules.llm.sampling import Sampler, Seen, uniforms

_AHEAD = 32  # tokens of each row whose random numbers are computed at once
_ROOM = 64  # tokens that the history has room for at first


class StopStrings:
    """Finds strings in what a response writes.

    Args:
        codec: of the tokenizer.
        strings: to find.

    Example:
        >>> class Letters:
        ...     def decode(self, tokens):
        ...         return "".join(map(chr, tokens))
        >>> finds = StopStrings(Letters(), ("END",))
        >>> finds(np.array([87, 69, 78])), finds(np.array([87, 69, 78, 68]))
        (False, True)
    """

    def __init__(self, codec: Codec, strings: Sequence[str]) -> None:
        self._decode, self._strings = codec.decode, strings
        # A token writes a byte at least; those of half a character may stand before them.
        self._most = max(len(string.encode()) for string in strings) + 4

    def __call__(self, tokens: npt.NDArray[np.int64]) -> bool:
        """Whether a string is complete with the last token.

        Args:
            tokens: of the response so far, int64 ``[response]``.
        """
        text = self._decode(tokens[-self._most :].tolist())
        return any(string in text for string in self._strings)


@dataclass(slots=True, eq=False)
class Row:
    """A response in progress.

    Attributes:
        request: that it answers.
        limit: tokens at most.
        deliver: takes its completion.
        sampling: how its tokens are sampled.
        ends: tokens that end it.
        stops: finds strings that end it; None: there are none.
        submitted, begun: when, in seconds of ``time.perf_counter``.
        start: step at which its first token was sampled.
        ended: whether it is over; its place in the batch is not yet given up then.
    """

    request: Request
    limit: int
    deliver: Callable[[Completion], None]
    sampling: Sampling
    ends: frozenset[int]
    stops: StopStrings | None = None
    submitted: float = field(default_factory=time.perf_counter)
    begun: float = 0.0
    start: int = 0
    ended: bool = False

    @property
    def key(self) -> Hashable:
        """Of the request."""
        return self.request.key


class Generator(NamedTuple):
    """What generates: shared by all batches of an engine.

    Attributes:
        lm: the model.
        sampler: draws tokens where requests say nothing else.
    """

    lm: CausalLM
    sampler: Sampler


class Decoding:
    """Responses that are generated in step.

    All rows share one cache, with padding on the left, and one count of steps. Step ``t`` writes line ``t`` of the
    history; a row's tokens are those of its column since the step at which it began. Rows that end keep their place
    until enough of them have, or others join; nothing reads what they still generate.

    Args:
        generator: model, sampler and end tokens.
        rows: to begin; those with equal prompts share one pass over it.
        version: of the weights.

    Attributes:
        cache_is_stale: whether the cache is to be computed again, before the next token.
    """

    def __init__(self, generator: Generator, rows: list[Row], version: Version) -> None:
        self._generator, self.rows = generator, rows
        self._device = generator.lm.device
        self._cache = generator.lm.caches.new()
        self._cached: int  # tokens in the cache, padding included
        self._pads: npt.NDArray[np.int64]  # [n]: columns of padding
        self._mask: torch.Tensor | None  # int64 [n, more than cached]; None: there is no padding
        self._last: torch.Tensor  # int64 [n, 1]: the tokens sampled last
        self._position: torch.Tensor  # int64 [n, 1]: theirs
        self._tokens: npt.NDArray[np.int64]  # [room, n]: the history
        self._log_probs: npt.NDArray[np.float32]  # [room, n]
        self._versions: list[Version] = []
        self._time = 0
        self.cache_is_stale = False
        # A tenth cheaper than no_grad() for small models. Nothing of it is trained on but what completions hold.
        with torch.inference_mode():
            logits = self._prefill()
            self._make_history(min(_ROOM, max(row.limit for row in rows)))
            self._renew()
            ended = self._sample(logits, version)
        if ended:
            self._end_rows()

    def step(self, version: Version, until: Callable[[], bool]) -> None:
        """Sample tokens, one of each row at least, until a row may have ended or it is time to stop.

        Rows that end write their completions.
        """
        with torch.inference_mode():
            if self.cache_is_stale:
                self._rebuild()
            while not (ended := self._sample(self._next_logits(), version)) and not until():
                pass
        if ended:
            self._end_rows()

    def _next_logits(self) -> torch.Tensor:
        """Run the model over the tokens sampled last."""
        cached = self._cached + 1
        if self._mask is not None and self._mask.shape[1] < cached:
            self._mask = self._new_mask(cached)
        mask = None if self._mask is None else self._mask[:, :cached]
        logits = self._generator.lm.next_logits(self._last, mask, self._position, self._cache)
        self._cached = cached
        return logits

    def join(self, other: Decoding) -> None:
        """Take in the rows of another batch, which has taken no more steps than this one."""
        self.drop_ended()
        other.drop_ended()
        width = max(self._cached, other._cached)
        join_rows(self._cache, other._cache, width)
        self._pads = np.concatenate([self._pads + (width - self._cached), other._pads + (width - other._cached)])
        self._cached = width
        self._position = torch.cat([self._position, other._position])
        self._last = torch.cat([self._last, other._last])
        begin, steps = self._time - other._time, other._time
        for name in ("_tokens", "_log_probs"):
            history, joined = getattr(self, name), getattr(other, name)
            columns = np.zeros((history.shape[0], joined.shape[1]), history.dtype)
            columns[begin : begin + steps] = joined[:steps]
            setattr(self, name, np.concatenate([history, columns], 1))
        for row in other.rows:
            row.start += begin
        self.rows = self.rows + other.rows
        self._view_history()
        self._mask = self._new_mask(width)
        self._renew()

    def end(self, rows: Sequence[Row], reason: FinishReason, error: BaseException | None = None) -> None:
        """End rows now, with the tokens so far."""
        self._complete([place for place, row in enumerate(self.rows) if row in rows], [reason] * len(rows), error)

    @property
    def num_active(self) -> int:
        """Rows that have not ended."""
        return self._active

    @property
    def num_tokens(self) -> int:
        """Tokens so far of rows that have not ended."""
        return sum(self._time - row.start for row in self.rows if not row.ended)

    def drop_ended(self) -> None:
        """Give up the places of rows that have ended."""
        places = [place for place, row in enumerate(self.rows) if not row.ended]
        if len(places) == len(self.rows):
            return
        kept = torch.tensor(places, device=self._device)
        self.rows = [self.rows[place] for place in places]
        self._pads = self._pads[places]
        surplus = int(self._pads.min()) if places else 0
        select_rows(self._cache, kept, surplus)
        self._pads -= surplus
        self._cached -= surplus
        self._position, self._last = self._position[kept], self._last[kept]
        self._tokens, self._log_probs = self._tokens[:, places], self._log_probs[:, places]
        self._view_history()
        self._mask = self._new_mask(self._cached)
        self._renew()

    def _prefill(self) -> torch.Tensor:
        """Run the model over the prompts; returns the logits of each row's first token."""
        arrays = [row.request.prompt.numpy() for row in self.rows]
        places = []
        if len(arrays) > 1:
            prompts: dict[bytes, int] = {}
            places = [prompts.setdefault(array.tobytes(), len(prompts)) for array in arrays]
            arrays = [np.frombuffer(prompt, np.int64) for prompt in prompts]
        logits = self._read(arrays)
        self._generator.lm.caches.check(self._cache)
        if len(arrays) < len(self.rows):
            shared = torch.tensor(places, device=self._device)
            select_rows(self._cache, shared)
            logits, self._pads = logits[shared], self._pads[places]
            self._mask = None if self._mask is None else self._mask[shared]
        return logits

    def _rebuild(self) -> None:
        """Compute the cache again, of all tokens but those sampled last."""
        self.drop_ended()
        self._cache = self._generator.lm.caches.new()
        self._read(
            [
                np.concatenate([row.request.prompt.numpy(), self._tokens[row.start : self._time - 1, place]])
                for place, row in enumerate(self.rows)
            ]
        )
        self.cache_is_stale = False

    def _read(self, arrays: Sequence[npt.NDArray[np.int64]]) -> torch.Tensor:
        """Run the model over sequences of tokens, with an empty cache; returns the logits after each."""
        lengths = [len(array) for array in arrays]
        width = max(lengths)
        self._pads = width - np.array(lengths)
        self._mask = self._new_mask(width)
        positions = np.arange(width)[None]
        if self._mask is None:
            ids = np.array(arrays)
        else:
            ids = np.zeros((len(arrays), width), np.int64)
            for line, array in zip(ids, arrays, strict=True):
                line[width - len(array) :] = array
            positions = np.maximum(positions - self._pads[:, None], 0)
        self._cached = width
        return self._generator.lm.next_logits(
            self._place(ids),
            None if self._mask is None else self._mask[:, :width],
            self._place(positions).expand(len(arrays), -1),
            self._cache,
        )

    def _place(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """The array as a tensor on the device of the model."""
        return torch.from_numpy(array).to(self._device)

    def _new_mask(self, cached: int) -> torch.Tensor | None:
        """The attention mask, with room for further tokens."""
        if not self._pads.any():
            return None
        return self._place((np.arange(cached + _ROOM) >= self._pads[:, None]).astype(np.int64))

    def _make_history(self, room: int) -> None:
        self._tokens = np.zeros((room, len(self.rows)), np.int64)
        self._log_probs = np.zeros((room, len(self.rows)), np.float32)
        self._view_history()

    def _view_history(self) -> None:
        """Lines of the history as what the model reads; views are cheapest where many are made at once."""
        self._lines = torch.from_numpy(self._tokens[:, :, None]).unbind()

    def _renew(self) -> None:
        """Bring up to date what depends on which rows there are."""
        self._seeds = np.array([row.request.seed for row in self.rows], np.uint64)
        self._starts = np.array([row.start for row in self.rows], np.int64)
        self._lengths = np.array([row.request.prompt.shape[0] for row in self.rows], np.int64)
        self._sampler = self._generator.sampler.of_rows([row.sampling for row in self.rows])
        self._ends = frozenset[int]().union(*{row.ends for row in self.rows})
        self._stops = [(place, row) for place, row in enumerate(self.rows) if row.stops is not None]
        if self._sampler.penalises:
            self._prompts = [np.unique(row.request.prompt.numpy()) for row in self.rows]
        self._used = self._planned = 0
        self._count()

    def _count(self) -> None:
        ends = [row.start + row.limit for row in self.rows if not row.ended]
        self._active, self._next_end = len(ends), min(ends, default=0)
        self._last_end = max(ends, default=0)

    def _plan(self) -> None:
        """Make what the next steps read and what depends on no token: random numbers and positions."""
        self._planned, self._used = max(min(_AHEAD, self._last_end - self._time), 1), 0
        first = self._time - self._starts
        self._numbers = self._sampler.place(uniforms(self._seeds, first, self._planned))
        positions = self._lengths + first
        if self._active < len(self.rows):
            positions[[row.ended for row in self.rows]] = -self._planned  # see _complete
        ahead = positions[:, None] + np.arange(self._planned)[:, None, None]
        self._ahead = self._place(np.maximum(ahead, 0))
        self._positions = self._ahead.unbind()

    def _sample(self, logits: torch.Tensor, version: Version) -> bool:
        """Sample, and write the history; returns whether a row may have ended."""
        if self._used == self._planned:
            self._plan()
        used, line = self._used, self._time
        seen = self._seen() if self._sampler.penalises else ()
        tokens, log_probs, ids = self._sampler(logits, self._numbers[used], seen)
        self._position = self._positions[used]
        if line == len(self._tokens):
            self._make_room()
            line = self._time
        self._tokens[line] = tokens
        self._log_probs[line] = log_probs
        self._last = self._lines[line] if ids is None else ids
        self._versions.append(version)
        self._used, self._time = used + 1, line + 1
        may_end = self._time >= self._next_end or not self._ends.isdisjoint(tokens)
        return may_end or (bool(self._stops) and any(self._has_stopped(place, row) for place, row in self._stops))

    def _seen(self) -> list[Seen]:
        """Tokens of each row so far."""
        return [
            Seen(prompt, self._tokens[row.start : self._time, place])
            for place, (row, prompt) in enumerate(zip(self.rows, self._prompts, strict=True))
        ]

    def _has_stopped(self, place: int, row: Row) -> bool:
        """Whether a string that ends the row is complete."""
        return row.stops is not None and not row.ended and row.stops(self._tokens[row.start : self._time, place])

    def _end_rows(self) -> None:
        """Complete rows that ended with the last token."""
        ends = [
            token in row.ends or self._has_stopped(place, row)
            for place, (token, row) in enumerate(zip(self._tokens[self._time - 1].tolist(), self.rows, strict=True))
        ]
        places, reasons = [], []
        for place, (row, end) in enumerate(zip(self.rows, ends, strict=True)):
            if not row.ended and (end or self._time - row.start >= row.limit):
                places.append(place)
                reasons.append(FinishReason.STOP if end else FinishReason.LENGTH)
        self._complete(places, reasons)
        num_ended = len(self.rows) - self._active
        if self._active and 4 * num_ended >= len(self.rows):
            self.drop_ended()

    def _complete(self, places: list[int], reasons: Sequence[FinishReason], error: BaseException | None = None) -> None:
        if not places:
            return
        for place, reason in zip(places, reasons, strict=True):
            row = self.rows[place]
            row.ended = True
            steps = slice(row.start, self._time)
            tokens, log_probs = self._tokens[steps, place].copy(), self._log_probs[steps, place].copy()
            if error is None and math.isnan(np.add.reduce(log_probs)):
                found: BaseException | None = _not_finite(row)
            else:
                found = error
            versions = _stamps(self._versions[steps])
            row.deliver(
                completion_of(row, torch.from_numpy(tokens), torch.from_numpy(log_probs), versions, reason, found)
            )
        self._count()
        if self._active:
            with torch.inference_mode():  # they may go on for some steps, but not beyond the model's positions
                self._ahead[:, places] = 0

    def _make_room(self) -> None:
        """Drop lines of the history that no row needs, or double it."""
        unneeded = min(row.start for row in self.rows if not row.ended)
        if 2 * unneeded >= self._time:
            self._tokens[: self._time - unneeded] = self._tokens[unneeded:]
            self._log_probs[: self._time - unneeded] = self._log_probs[unneeded:]
            del self._versions[:unneeded]
            self._time -= unneeded
            for row in self.rows:
                row.start -= unneeded
            self._starts -= unneeded
            self._count()
            return
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._log_probs = np.concatenate([self._log_probs, np.zeros_like(self._log_probs)])
        self._view_history()


def completion_of(
    row: Row,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    versions: torch.Tensor | Sequence[str],
    reason: FinishReason,
    error: BaseException | None = None,
) -> Completion:
    """The completion of a row, with the seconds that it took."""
    now = time.perf_counter()
    begun = row.begun or now
    return Completion(
        row.key,
        tokens,
        log_probs,
        versions,
        FinishReason.ERROR if error is not None else reason,
        {"queue": begun - row.submitted, "generation": now - begun},
        error=error,
    )


def _stamps(versions: Sequence[Version]) -> torch.Tensor | Sequence[str]:
    """Versions of the tokens of a response: int64 ``[response]``, or UUIDs."""
    if all(isinstance(version, int) for version in set(versions)):
        return torch.from_numpy(np.array(versions, np.int64))
    return [str(version) for version in versions]


def _not_finite(row: Row) -> ValueError:
    return ValueError(f"request {row.key!r}: the model's logits are not finite. Check its weights, and its dtype.")
