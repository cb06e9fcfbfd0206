"""Sampling of tokens from logits, with log-probabilities, by generators that depend on seed and position only.

The distribution of a row is the softmax of its logits after penalties, temperature, min-p, top-k and top-p, in this
order, which is vLLM's. Tokens that tie with the last one kept are kept too.

A row draws with two numbers in [0, 1) for each token: hashes (SplitMix64) of its seed and of the token's place in the
response. The first one picks a block of the vocabulary by the inverse of its cumulative probabilities, the second one
a token of that block. Nothing of it depends on other rows; probabilities are float32, and their sums float64.

What is guaranteed: equal logits and equal seeds give equal tokens, in any batch. Logits themselves change with the size
of a batch by float32's rounding (about 1e-7 of their scale), because matrix products are summed in another order. The
next token then differs where a number falls between the two values of a cumulative probability. The blocks keep this
rare: about 1e-7 a token for a vocabulary of some hundreds, growing with the root of its size. Models in half precision
round a thousand times coarser.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from rollwright.data.llm.turns import LogProbMode
from rollwright.modules.llm.engine import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN_2, _MASK = 2 * 0x9E3779B97F4A7C15, 2**64 - 1
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_AS_THEY_ARE = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NO_PENALTIES = (
    "{}: log-probabilities under penalties depend on where the response begins. Pass log_prob_mode='raw', or call "
    "token_log_probs(logits, response, sampling, prompt) for each response."
)
_30, _27, _31, _13 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(13)


def uniforms(seeds: npt.NDArray[np.uint64], first: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for tokens of responses, by seed and place.

    Args:
        seeds: of the rows, uint64 ``[n]``.
        first: place in its response of each row's first token, from 0, int64 ``[n]``.
        count: tokens of each row.

    Returns:
        float64 ``[count, 2, n]``; each a multiple of 2**-51 plus 2**-52, so that times a total it is less than that.

    Example:
        >>> both = uniforms(np.array([7, 8], np.uint64), np.array([0, 3]), 4)
        >>> alone = uniforms(np.array([8], np.uint64), np.array([5]), 1)
        >>> bool((both[2, :, 1] == alone[0, :, 0]).all())
        True
    """
    states = [
        (_mixed_int(seed) + _GOLDEN_2 * place) & _MASK
        for seed, place in zip(seeds.tolist(), first.tolist(), strict=True)
    ]
    bits = _mixed(np.array(states, np.uint64) + _counts(count))  # sums and products of uint64 wrap around
    return ((bits >> _13).astype(np.float64) + 0.5) * 2.0**-51


@cache
def _counts(count: int) -> npt.NDArray[np.uint64]:
    return (_GOLDEN * np.arange(1, 2 * count + 1, dtype=np.uint64)).reshape(count, 2, 1)


def child_seed(seed: int, index: int) -> int:
    """A seed of 63 bits for the ``index``-th sample of a prompt with ``seed``; that of the first is ``seed`` itself."""
    if index == 0:
        return seed
    return _mixed_int(_mixed_int(seed) ^ (int(_GOLDEN) * index & _MASK)) >> 1


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> _30)) * _MIX_1
    bits = (bits ^ (bits >> _27)) * _MIX_2
    return cast("npt.NDArray[np.uint64]", bits ^ (bits >> _31))


def _mixed_int(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


class Drawn(NamedTuple):
    """Tokens that were drawn, one for each row.

    Attributes:
        tokens: ``n`` of them.
        log_probs: of these tokens.
        ids: the tokens as a tensor on the device of the logits, int64 ``[n, 1]``; None: that is the CPU, where the
            caller has them.
    """

    tokens: list[int]
    log_probs: list[float]
    ids: torch.Tensor | None


class Seen(NamedTuple):
    """Tokens that rows have, as penalties read them.

    Attributes:
        prompt: different tokens of the prompt, int64 ``[tokens]``.
        response: tokens of the response so far, int64 ``[tokens]``.
    """

    prompt: npt.NDArray[np.int64]
    response: npt.NDArray[np.int64]


class Sampler:
    """Draws one token for each row of logits.

    On the CPU it searches rows one by one, in Python, which costs less than operations on small tensors; elsewhere it
    works on tensors, and tokens and log-probabilities are copied to the CPU together.

    Args:
        sampling: how; a list: of each row. Rows of equal distributions are worked on together.
        device: of the logits.

    Attributes:
        penalises: whether it has to know the tokens of rows.

    Example:
        >>> sampler = Sampler(Sampling(top_k=1))
        >>> numbers = sampler.place(uniforms(np.array([0, 1], np.uint64), np.array([0, 0]), 1))
        >>> drawn = sampler(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), numbers[0])
        >>> drawn.tokens, drawn.log_probs
        ([1, 0], [0.0, 0.0])
    """

    def __init__(self, sampling: Sampling | Sequence[Sampling], device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._draw = draw_by_rows if self._device.type == "cpu" else draw_by_tensors
        rows = [sampling] if isinstance(sampling, Sampling) else sampling
        self._sampling = rows[0]
        self._raw = rows[0].log_prob_mode == "raw"
        kinds: dict[Any, list[int]] = {}
        for place, row in enumerate(rows):
            kinds.setdefault(row.distribution, []).append(place)
        self._groups = [(rows[places[0]], torch.tensor(places, device=device)) for places in kinds.values()]
        if len(self._groups) == 1:
            self._groups = []
        self._penalties = [row.penalties for row in rows]
        self.penalises = any(row.penalises for row in rows)
        self._is_greedy = not self._groups and rows[0].temperature == 0
        self._restricts = rows[0].temperature != 1 or rows[0].top_k > 0 or rows[0].top_p < 1 or rows[0].min_p > 0

    def of_rows(self, rows: Sequence[Sampling]) -> Sampler:
        """A sampler of rows: this one where they are as its own."""
        own = self._sampling.distribution
        if not self._groups and all(row is self._sampling or row.distribution == own for row in rows):
            return self
        return Sampler(rows, self._device)

    def place(self, numbers: npt.NDArray[np.float64]) -> Any:
        """Numbers of :func:`uniforms` where they are needed."""
        return numbers.tolist() if self._draw is draw_by_rows else torch.from_numpy(numbers).to(self._device)

    def __call__(self, logits: torch.Tensor, numbers: Any, seen: Sequence[Seen] = ()) -> Drawn:
        """Draw.

        Args:
            logits: ``[n, vocab]``, of any float dtype, without gradients.
            numbers: for each token two of each row, as :meth:`place` returned them.
            seen: tokens of each row; read by penalties only.

        Returns:
            The tokens. Where logits are NaN, so are log-probabilities.
        """
        if logits.dtype is not torch.float32:
            logits = logits.float()
        kept = self._penalised(logits, seen) if self.penalises else logits
        if self._is_greedy:
            return self._draw(logits, kept, None, self._raw)
        if self._groups:
            parts = [(places, restrict(kept[places], sampling)) for sampling, places in self._groups]
            kept = torch.empty_like(logits)
            for places, part in parts:
                kept[places] = part
        elif self._restricts:
            kept = restrict(kept, self._sampling)
        return self._draw(logits, kept, numbers, self._raw)

    def _penalised(self, logits: torch.Tensor, seen: Sequence[Seen]) -> torch.Tensor:
        rows, ids, counts = [], [], []
        for row, (prompt, response) in enumerate(seen):
            values, repeats = np.unique(np.concatenate([prompt, response]), return_counts=True)
            if values[-1] >= logits.shape[1]:  # a table of embeddings may have more rows than there are logits
                values, repeats = values[values < logits.shape[1]], repeats[values < logits.shape[1]]
            rows.append(np.full(len(values), row))
            ids.append(values)
            counts.append(repeats - np.isin(values, prompt))
        penalties = np.array(self._penalties * (len(seen) // len(self._penalties)))
        at, of, times = (torch.from_numpy(np.concatenate(one)).to(self._device) for one in (rows, ids, counts))
        chosen = logits[at, of]
        each = torch.from_numpy(penalties).to(self._device, chosen.dtype)[at].unbind(-1)
        return logits.index_put((at, of), _penalised(chosen, times, *each))


def _penalised(logits: torch.Tensor, times: torch.Tensor, repetition: Any, presence: Any, frequency: Any) -> Any:
    """Logits of tokens that were seen, after penalties.

    Args:
        logits: of any shape.
        times: how often the response has them.
        repetition: divides positive logits, and multiplies negative ones.
        presence: is taken from logits of tokens that the response has.
        frequency: is taken for each time that it has them.
    """
    return torch.where(logits > 0, logits / repetition, logits * repetition) - (
        frequency * times + presence * (times > 0)
    )


def draw_by_rows(logits: torch.Tensor, kept: torch.Tensor, numbers: Any, raw: bool) -> Drawn:
    """Draw on the CPU.

    Args:
        logits: float32 ``[n, vocab]``.
        kept: the same after :func:`restrict`.
        numbers: two rows of ``n`` floats; None: the most probable tokens.
        raw: whether log-probabilities are of ``logits``, and not of ``kept``.
    """
    tokens: list[int] = []
    log_probs: list[float] = []
    if numbers is None:
        best, places = kept.max(-1)
        tokens, log_probs = places.tolist(), (best - best).tolist()  # NaN where the logits are
    else:
        probs = kept.softmax(-1).numpy()
        width, firsts = _blocks(probs.shape[1])
        totals = np.add.reduceat(probs, firsts, -1, np.float64).cumsum(-1).tolist()
        for row, ends, first, second in zip(probs, totals, *numbers, strict=True):
            if ends[-1] != ends[-1]:
                tokens.append(0)
                log_probs.append(math.nan)
                continue
            begin = width * bisect_right(ends, first * ends[-1])
            block = row[begin : begin + width].tolist()
            inside = list(accumulate(block))
            place = bisect_right(inside, second * inside[-1])
            tokens.append(begin + place)
            log_probs.append(math.log(block[place]))
    if raw and (numbers is None or kept is not logits):
        log_probs = logits.log_softmax(-1).numpy()[np.arange(len(tokens)), tokens].tolist()
    return Drawn(tokens, log_probs, None)


def draw_by_tensors(logits: torch.Tensor, kept: torch.Tensor, numbers: Any, raw: bool) -> Drawn:
    """Draw on any device; see :func:`draw_by_rows`. Waits for the device once."""
    vocab = kept.shape[1]
    if numbers is None:
        best, tokens = kept.max(-1, keepdim=True)
        log_probs = (best - best).double()
    else:
        width, firsts = _blocks(vocab)
        probs = functional.pad(kept.softmax(-1), (0, len(firsts) * width - vocab))
        blocks = probs.view(len(probs), -1, width)
        totals = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
        block = torch.searchsorted(totals, numbers[0, :, None] * totals[:, -1:], right=True)
        block.clamp_(max=blocks.shape[1] - 1)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, width))[:, 0].cumsum(-1, dtype=torch.float64)
        place = torch.searchsorted(inside, numbers[1, :, None] * inside[:, -1:], right=True)
        tokens = (block * width + place).clamp_(max=vocab - 1)
        log_probs = probs.gather(1, tokens).double().log()
    if raw and (numbers is None or kept is not logits):
        log_probs = (logits.gather(1, tokens) - torch.logsumexp(logits, -1, keepdim=True)).double()
    both = torch.cat([tokens.double(), log_probs], 1).cpu()  # ids are exact in float64
    return Drawn(both[:, 0].long().tolist(), both[:, 1].tolist(), tokens)


@cache
def _blocks(vocab: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Tokens of a block, about the root of the vocabulary, and the first token of each."""
    width = 1 << math.ceil(math.log2(vocab) / 2)
    return width, np.arange(0, vocab, width)


def restrict(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits after temperature, min-p, top-k and top-p; the same tensor where there is nothing to do.

    Args:
        logits: float32 ``[..., vocab]``, after penalties.
        sampling: how; with a temperature of 0, the most probable token alone is left.
    """
    if sampling.temperature == 0:
        best, places = logits.max(-1, keepdim=True)
        return torch.full_like(logits, -math.inf).scatter(-1, places, best - best)  # NaN where the logits are
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.min_p > 0:
        least = logits.max(-1, keepdim=True).values + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < least, -math.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        ordered = logits.detach().sort(-1, descending=True).values
        probs = ordered.softmax(-1, dtype=torch.float64)
        before = probs.cumsum(-1) - probs  # of the tokens that are more probable
        num_kept = (before < sampling.top_p).sum(-1, keepdim=True).clamp_(min=1)
        logits = logits.masked_fill(logits < ordered.gather(-1, num_kept - 1), -math.inf)
    return logits


def token_log_probs(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling, prompt: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probabilities of given tokens, by the mode of ``sampling``; gradients flow to the logits.

    Args:
        logits: of the distributions of these tokens, ``[..., vocab]``.
        tokens: int64 ``[...]``.
        sampling: how they were sampled, and the mode; with temperature 0 and mode ``"sampled"``, the most probable
            token has 0 and others ``-inf``.
        prompt: tokens before, int64 ``[prompt]``. Needed with penalties and mode ``"sampled"``: ``tokens`` are then one
            response, int64 ``[response]``.

    Returns:
        float32 ``[...]``; ``-inf`` where min-p, top-k or top-p leave a token out.

    Raises:
        ValueError: there are penalties, and ``prompt`` is None.

    Example:
        >>> logits = torch.tensor([[0.0, math.log(3.0)]])
        >>> token_log_probs(logits, torch.tensor([1]), Sampling()).exp()
        tensor([0.7500])
        >>> token_log_probs(logits, torch.tensor([1]), Sampling(temperature=0.5)).exp()
        tensor([0.9000])
    """
    logits = logits.float()
    if sampling.log_prob_mode == "sampled":
        if sampling.penalises:
            if prompt is None:
                raise ValueError(NO_PENALTIES.format("prompt"))
            written = functional.one_hot(tokens[:-1], logits.shape[-1]).cumsum(0)
            times = functional.pad(written, (0, 0, 1, 0))[: len(tokens)]
            seen = times > 0
            seen[:, prompt[prompt < logits.shape[-1]]] = True
            logits = torch.where(seen, _penalised(logits, times, *sampling.penalties), logits)
        if sampling.temperature == 0:
            is_best = tokens == logits.argmax(-1)
            return torch.zeros_like(tokens, dtype=torch.float32).masked_fill(~is_best, -math.inf)
        logits = restrict(logits, sampling)
    chosen = logits.gather(-1, tokens[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, -1)


def sampling_of(kwargs: dict[str, Any], *, log_prob_mode: LogProbMode, end_ids: Sequence[int] = ()) -> Sampling:
    """Sampling of ``generate_kwargs``.

    Raises:
        ValueError: an unknown name, two names of one thing, or a value that :class:`Sampling` refuses.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    known = {"max_tokens", "do_sample", *(field.name for field in fields(Sampling))} - {"log_prob_mode"}
    if unknown := sorted(given.keys() - known):
        raise ValueError(
            f"generate_kwargs: {', '.join(map(repr, unknown))} are not supported. Expected some of "
            f"{', '.join(sorted(known))}; these name the distribution that log-probabilities belong to."
        )
    if {"max_new_tokens", "max_tokens"} <= given.keys():
        raise ValueError("generate_kwargs: got max_tokens beside max_new_tokens, which is the same. Drop one of them.")
    stop, strings = given.get("stop_token_ids", ()), given.get("stop", ())
    changes: dict[str, Any] = {
        **{name: given.get(name) for name in _AS_THEY_ARE},
        "max_new_tokens": given.get("max_new_tokens", given.get("max_tokens")),
        "top_k": max(given["top_k"], 0)
        if isinstance(given.get("top_k"), int)
        else given.get("top_k"),  # vLLM writes -1 for all
        "stop": (strings,) if isinstance(strings, str) else tuple(strings),
        "stop_token_ids": (*((stop,) if isinstance(stop, int) else stop), *end_ids),
        "log_prob_mode": log_prob_mode,
    }
    if given.get("do_sample") is False:
        changes["temperature"] = 0.0
    return Sampling(**{name: value for name, value in changes.items() if value is not None})
