"""Responses that are being generated side by side: their cache, and their tokens so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from rollwright.data.llm.turns import FinishReason, Version
from rollwright.modules.llm.causal_lm import CausalLM
from rollwright.modules.llm.engine import Completion, Request
from rollwright.modules.llm.sampling import Sampler, uniforms

__all__ = ["Decoding", "Generator", "Row", "completion_of"]

_AHEAD = 32  # tokens of each row whose random numbers are computed at once
_ROOM = 64  # tokens that the history has room for at first


@dataclass(slots=True, eq=False)
class Row:
    """A response in progress.

    Attributes:
        request: that it answers.
        limit: tokens at most.
        deliver: takes its completion.
        submitted, begun: when, in seconds of ``time.perf_counter``.
        start: step at which its first token was sampled.
        ended: whether it is over; its place in the batch is not yet given up then.
    """

    request: Request
    limit: int
    deliver: Callable[[Completion], None]
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
        sampler: draws tokens.
        is_end: bool ``[vocab]``: tokens that end a response.
    """

    lm: CausalLM
    sampler: Sampler
    is_end: npt.NDArray[np.bool_]


class Decoding:
    """Responses that are generated in step.

    All rows share one cache, with padding on the left, and one count of steps. Step ``t`` writes line ``t`` of the
    history; a row's tokens are those of its column since the step at which it began. Rows that end keep their place
    until enough of them have, or others join; nothing reads what they still generate.

    Args:
        generator: model, sampler and end tokens.
        rows: to begin; those with equal prompts share one pass over it.
        version: of the weights.
    """

    def __init__(self, generator: Generator, rows: list[Row], version: Version) -> None:
        self._generator, self.rows = generator, rows
        self._cache = generator.lm.new_cache()
        self._cached: int  # tokens in the cache, padding included
        self._pads: torch.Tensor  # int64 [n]: columns of padding
        self._positions: torch.Tensor  # int64 [n, 1]: of the tokens sampled last
        self._last: torch.Tensor  # int64 [n, 1]: these tokens
        device = generator.lm.device
        logits = self._prefill(device)
        room = min(_ROOM, max(row.limit for row in rows))
        self._tokens = np.zeros((room, len(rows)), np.int64)
        self._log_probs = np.zeros((room, len(rows)), np.float32)
        self._versions: list[Version] = []
        self._time = 0
        self._renew()
        self._record(logits, version)

    def step(self, version: Version) -> None:
        """Sample one token of each row; those that end write their completions."""
        if self._at_most <= self._cached:
            self._renew_mask()
        mask = None if self._mask is None else self._mask[:, : self._cached + 1]
        logits = self._generator.lm.next_logits(self._last, mask, self._positions, self._cache)
        self._cached += 1
        self._positions += 1
        self._record(logits, version)

    def join(self, other: Decoding) -> None:
        """Take in the rows of another batch, which has taken no more steps than this one."""
        self.drop_ended()
        other.drop_ended()
        width = max(self._cached, other._cached)
        for own, others in zip(self._cache.layers, other._cache.layers, strict=True):
            own.keys = torch.cat([_wider(own.keys, width), _wider(others.keys, width)])
            own.values = torch.cat([_wider(own.values, width), _wider(others.values, width)])
        self._pads = torch.cat([self._pads + (width - self._cached), other._pads + (width - other._cached)])
        self._cached = width
        self._positions = torch.cat([self._positions, other._positions])
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
        self._renew()

    def end(self, rows: Sequence[Row], reason: FinishReason, error: BaseException | None = None) -> None:
        """End rows now, with the tokens so far."""
        self._complete([place for place, row in enumerate(self.rows) if row in rows], [reason] * len(rows), error)

    @property
    def num_active(self) -> int:
        """Rows that have not ended."""
        return self._active

    def drop_ended(self) -> None:
        """Give up the places of rows that have ended."""
        places = [place for place, row in enumerate(self.rows) if not row.ended]
        if len(places) == len(self.rows):
            return
        kept = torch.tensor(places, device=self._last.device)
        self.rows = [self.rows[place] for place in places]
        self._pads = self._pads[kept]
        surplus = int(self._pads.min()) if places else 0
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[kept, :, surplus:], layer.values[kept, :, surplus:]
        self._pads -= surplus
        self._cached -= surplus
        self._positions, self._last = self._positions[kept], self._last[kept]
        self._tokens, self._log_probs = self._tokens[:, places], self._log_probs[:, places]
        self._renew()

    def _prefill(self, device: torch.device) -> torch.Tensor:
        """Run the model over the prompts; returns the logits of each row's first token."""
        prompts: dict[bytes, int] = {}
        places = [prompts.setdefault(row.request.prompt.numpy().tobytes(), len(prompts)) for row in self.rows]
        arrays = [np.frombuffer(prompt, np.int64) for prompt in prompts]
        lengths = np.array([len(array) for array in arrays])
        width = int(lengths.max())
        ids = np.zeros((len(arrays), width), np.int64)
        for line, array in zip(ids, arrays, strict=True):
            line[width - len(array) :] = array
        pads = width - lengths
        positions = np.maximum(np.arange(width) - pads[:, None], 0)
        mask = (np.arange(width) >= pads[:, None]).astype(np.int64) if pads.any() else None
        lm = self._generator.lm
        logits = lm.next_logits(
            torch.from_numpy(ids).to(device),
            None if mask is None else torch.from_numpy(mask).to(device),
            torch.from_numpy(positions).to(device),
            self._cache,
        )
        _check_cache(self._cache, lm)
        self._cached = width
        self._pads = torch.from_numpy(pads).to(device)
        self._positions = torch.from_numpy(lengths[:, None]).to(device)
        if len(arrays) < len(self.rows):
            shared = torch.tensor(places, device=device)
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[shared], layer.values[shared]
            logits, self._pads, self._positions = logits[shared], self._pads[shared], self._positions[shared]
        self._last = self._positions  # replaced by the first token
        return logits

    def _renew(self) -> None:
        """Bring up to date what depends on which rows there are."""
        self._seeds = np.array([row.request.seed for row in self.rows], np.uint64)
        self._starts = np.array([row.start for row in self.rows], np.int64)
        self._drawn = _AHEAD  # numbers of the next steps are computed anew
        self._count()
        self._padded = bool((self._pads > 0).any())
        self._renew_mask()

    def _count(self) -> None:
        ends = [row.start + row.limit for row in self.rows if not row.ended]
        self._active, self._next_end = len(ends), min(ends, default=0)

    def _renew_mask(self) -> None:
        self._at_most = self._cached + 1 + 4 * _ROOM
        columns = torch.arange(self._at_most, device=self._pads.device)
        self._mask = (columns >= self._pads[:, None]).long() if self._padded else None

    def _record(self, logits: torch.Tensor, version: Version) -> None:
        """Sample, write the history, and complete rows that ended."""
        if self._drawn == _AHEAD:
            numbers = uniforms(self._seeds, self._time - self._starts, _AHEAD)
            self._numbers, self._drawn = self._generator.sampler.place(numbers), 0
        tokens, log_probs, self._last = self._generator.sampler(logits, self._numbers[self._drawn])
        self._drawn += 1
        if self._time == len(self._tokens):
            self._make_room()
        self._tokens[self._time] = tokens
        self._log_probs[self._time] = log_probs
        self._versions.append(version)
        self._time += 1
        ends = self._generator.is_end[tokens]
        if self._time >= self._next_end or ends.any():
            self._end_rows(ends.tolist())

    def _end_rows(self, ends: list[bool]) -> None:
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
        first = min(self.rows[place].start for place in places)
        # Copied once, for all rows that end together; what completions hold are views of it.
        tokens = torch.from_numpy(np.ascontiguousarray(self._tokens[first : self._time, places].T))
        log_probs = torch.from_numpy(np.ascontiguousarray(self._log_probs[first : self._time, places].T))
        for place, reason, ids, values in zip(places, reasons, tokens, log_probs, strict=True):
            row = self.rows[place]
            row.ended = True
            begin = row.start - first
            versions = self._versions[row.start : self._time]
            row.deliver(completion_of(row, ids[begin:], values[begin:], versions, reason, error))
            self._positions[place] = 0  # it may go on for some steps, but not beyond the model's positions
        self._count()

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


def completion_of(
    row: Row,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    versions: Sequence[Version],
    reason: FinishReason,
    error: BaseException | None = None,
) -> Completion:
    """The completion of a row, with the seconds that it took; one whose log-probabilities are NaN is an error."""
    if error is None and bool(log_probs.isnan().any()):
        error = ValueError(f"request {row.key!r}: the model's logits are not finite. Check its weights, and its dtype.")
    now = time.perf_counter()
    begun = row.begun or now
    numbered = all(isinstance(version, int) for version in versions)
    return Completion(
        row.key,
        tokens,
        log_probs,
        torch.tensor(versions, dtype=torch.int64) if numbered else [str(version) for version in versions],
        FinishReason.ERROR if error is not None else reason,
        {"queue": begun - row.submitted, "generation": now - begun},
        error=error,
    )


def _wider(states: torch.Tensor, width: int) -> torch.Tensor:
    return functional.pad(states, (0, 0, width - states.shape[-2], 0))


def _check_cache(cache: Any, lm: CausalLM) -> None:
    """Rows can be moved between caches of keys and values, and between no others."""
    from transformers.cache_utils import DynamicLayer

    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if others or not cache.layers:
        raise TypeError(
            f"model: {type(lm.model).__name__} caches {', '.join(others) or 'nothing'}; expected keys and values of "
            "attention layers (DynamicLayer of transformers). Use a model with attention layers only."
        )
