"""Sampling of tokens from logits, with log-probabilities, by generators that depend on seed and position only.

The distribution of a row is the softmax of its logits after temperature, then top-k, then top-p, as transformers and
vLLM apply them. Tokens that tie with the last one kept are kept too.

A row draws with two numbers in [0, 1) for each token: hashes (SplitMix64) of its seed and of the token's place in the
response. The first one picks a block of the vocabulary by the inverse of its cumulative probabilities, the second one
a token of that block. Nothing of it depends on other rows, and sums are float64.

What is guaranteed: equal logits and equal seeds give equal tokens, in any batch. Logits themselves change with the size
of a batch by float32's rounding (about 1e-7 of their scale), because matrix products are summed in another order. The
next token then differs where a number falls between the two values of a cumulative probability. The blocks keep this
rare: about 1e-7 a token for a vocabulary of some hundreds, growing with the root of its size. Models in half precision
round a thousand times coarser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from rollwright.modules.llm.engine import Sampling

__all__ = ["Sampler", "child_seed", "token_log_probs", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
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
    place = (2 * (first + np.arange(count)[:, None]))[:, None, :] + np.array([[1], [2]])
    with np.errstate(over="ignore"):
        bits = _mixed(_mixed(seeds) + _GOLDEN * place.astype(np.uint64))
    return ((bits >> _13).astype(np.float64) + 0.5) * 2.0**-51


def child_seed(seed: int, index: int) -> int:
    """A seed of 63 bits for the ``index``-th sample of a prompt with ``seed``; that of the first is ``seed`` itself."""
    if index == 0:
        return seed
    with np.errstate(over="ignore"):
        bits = _mixed(_mixed(np.array([seed], np.uint64)) ^ (_GOLDEN * np.uint64(index)))
    return int(bits[0]) >> 1


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> _30)) * _MIX_1
    bits = (bits ^ (bits >> _27)) * _MIX_2
    return cast("npt.NDArray[np.uint64]", bits ^ (bits >> _31))


class Sampler:
    """Draws one token for each row of logits.

    Args:
        sampling: how.

    Example:
        >>> sampler = Sampler(Sampling(top_k=1))
        >>> numbers = torch.from_numpy(uniforms(np.array([0, 1], np.uint64), np.array([0, 0]), 1))[0]
        >>> tokens, log_probs = sampler(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), numbers)
        >>> tokens.tolist(), log_probs.tolist()
        ([1, 0], [0.0, 0.0])
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._raw = sampling.log_prob_mode == "raw"
        self._weights: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw.

        Args:
            logits: ``[n, vocab]``, of any float dtype.
            numbers: of :func:`uniforms`, float64 ``[2, n]``, on the device of the logits.

        Returns:
            Tokens, int64 ``[n]``, and their log-probabilities, float32 ``[n]``; where logits are NaN, so are these.
        """
        logits = logits.float()
        if self._sampling.temperature == 0:
            best, tokens = logits.max(-1)
            if self._raw:
                return tokens, best - torch.logsumexp(logits, -1)
            return tokens, best - best  # the only token there is: 0, or NaN
        kept = restrict(logits, self._sampling)
        tokens, log_probs = self._draw(kept, numbers)
        if self._raw and kept is not logits:
            log_probs = logits.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(logits, -1)
        return tokens, log_probs

    def _draw(self, logits: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocab = logits.shape
        blocks = self._blocks(logits)  # padded with zeros to whole blocks
        weights, width = blocks.view(rows, -1), blocks.shape[2]
        best = logits.amax(-1, keepdim=True)
        torch.sub(logits, best, out=weights[:, :vocab]).exp_()
        totals = blocks.sum(-1, dtype=torch.float64).cumsum_(-1)
        last = totals[:, -1:]
        block = torch.searchsorted(totals, numbers[0, :, None] * last, right=True).clamp_(max=blocks.shape[1] - 1)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, width))[:, 0].cumsum(-1, dtype=torch.float64)
        place = torch.searchsorted(inside, numbers[1, :, None] * inside[:, -1:], right=True)
        tokens = block.mul_(width).add_(place).clamp_(max=vocab - 1)
        log_probs = logits.gather(1, tokens).sub_(best).sub_(last.log())
        return tokens[:, 0], log_probs[:, 0]

    def _blocks(self, logits: torch.Tensor) -> torch.Tensor:
        """Room for weights, float32 ``[n, blocks, width]``, of about the root of the vocabulary each way."""
        rows, vocab = logits.shape
        held = self._weights
        if held is None or held.shape[0] != rows or held.device != logits.device:
            width = 1 << math.ceil(math.log2(vocab) / 2)
            held = self._weights = logits.new_zeros(rows, -(-vocab // width), width)
        return held


def restrict(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits after temperature, top-k and top-p; the same tensor where there is nothing to do.

    Args:
        logits: float32 ``[..., vocab]``.
        sampling: of a temperature above 0.
    """
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
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


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities of given tokens, by the mode of ``sampling``; gradients flow to the logits.

    Args:
        logits: of the distributions of these tokens, ``[..., vocab]``.
        tokens: int64 ``[...]``.
        sampling: temperature, top-k, top-p and mode; with temperature 0 and mode ``"sampled"``, the most probable
            token has 0 and others ``-inf``.

    Returns:
        float32 ``[...]``; ``-inf`` where top-k or top-p leave a token out.

    Example:
        >>> logits = torch.tensor([[0.0, math.log(3.0)]])
        >>> token_log_probs(logits, torch.tensor([1]), Sampling()).exp()
        tensor([0.7500])
        >>> token_log_probs(logits, torch.tensor([1]), Sampling(temperature=0.5)).exp()
        tensor([0.9000])
    """
    logits = logits.float()
    if sampling.log_prob_mode == "sampled":
        if sampling.temperature == 0:
            is_best = tokens == logits.argmax(-1)
            return torch.zeros_like(tokens, dtype=torch.float32).masked_fill(~is_best, -math.inf)
        logits = restrict(logits, sampling)
    chosen = logits.gather(-1, tokens[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, -1)


def sampling_of(kwargs: dict[str, Any], *, log_prob_mode: str, end_ids: Sequence[int] = ()) -> Sampling:
    """Sampling of ``generate_kwargs``.

    Raises:
        ValueError: an unknown name, two names of one thing, or a value that :class:`Sampling` refuses.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    known = {"max_new_tokens", "max_tokens", "temperature", "top_k", "top_p", "do_sample", "stop_token_ids"}
    if unknown := sorted(given.keys() - known):
        raise ValueError(
            f"generate_kwargs: {', '.join(map(repr, unknown))} are not supported. Expected some of "
            f"{', '.join(sorted(known))}; these name the distribution that log-probabilities belong to."
        )
    if {"max_new_tokens", "max_tokens"} <= given.keys():
        raise ValueError("generate_kwargs: got max_tokens beside max_new_tokens, which is the same. Drop one of them.")
    stop = given.get("stop_token_ids", ())
    changes: dict[str, Any] = {
        "max_new_tokens": given.get("max_new_tokens", given.get("max_tokens")),
        "temperature": given.get("temperature"),
        "top_k": max(given["top_k"], 0) if "top_k" in given else None,  # vLLM writes -1 for all
        "top_p": given.get("top_p"),
        "stop_token_ids": (*((stop,) if isinstance(stop, int) else stop), *end_ids),
        "log_prob_mode": log_prob_mode,
    }
    if given.get("do_sample") is False:
        changes["temperature"] = 0.0
    return Sampling(**{name: value for name, value in changes.items() if value is not None})
