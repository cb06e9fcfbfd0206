"""Categorical distributions: as one-hot vectors, and with outcomes that are not allowed."""
# torch.distributions has few types
# mypy: disable-error-code="attr-defined, no-any-return, no-untyped-call, type-arg"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributions as D
from torch.nn import functional as F

__all__ = ["MaskedCategorical", "OneHotCategorical", "score_masked"]


class OneHotCategorical(D.Categorical):
    """A categorical distribution whose values are one-hot vectors of integers.

    Args:
        logits: ``[*batch, n]``.
        probs: instead of logits; normalised.

    Example:
        >>> dist = OneHotCategorical(logits=torch.tensor([0.0, 5.0]))
        >>> dist.mode, dist.log_prob(dist.mode).shape
        (tensor([0, 1]), torch.Size([]))
    """

    num_params: int = 1

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None, **kwargs: Any) -> None:
        given = logits if logits is not None else probs
        if given is not None and given.shape[-1] == 1:  # one dimension too many
            logits, probs = (None if each is None else each[..., 0] for each in (logits, probs))
        super().__init__(probs=probs, logits=logits, **kwargs)
        self.num_samples = self._num_events

    def log_prob(self, value: Tensor) -> Tensor:
        """Of one-hot vectors ``[*batch, n]``."""
        return super().log_prob(value.argmax(-1))

    @property
    def mode(self) -> Tensor:
        """int64 ``[*batch, n]``: one where the logit is greatest, at each of them where several are."""
        return (self.logits == self.logits.max(-1, True)[0]).to(torch.long)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mode."""
        return self.mode

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """int64 ``[*sample_shape, *batch, n]``."""
        return F.one_hot(super().sample(torch.Size(sample_shape or ())), self._num_events)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """A sample in the dtype of the probabilities, with their gradient (straight-through)."""
        return self.sample(sample_shape) + self.probs - self.probs.detach()


class MaskedCategorical(D.Categorical):
    """A categorical distribution with outcomes that are not allowed.

    Args:
        logits: ``[*batch, n]``.
        probs: instead of logits; need not be normalised.
        mask: bool ``[*batch, n]``, True for outcomes that are allowed.
        indices: instead of a mask: int64 ``[*batch, m]``, the outcomes that are allowed.
        neg_inf: the logit of others.
        padding_value: an index in ``indices`` that stands for none.
        use_cross_entropy: compute log-probs by ``torch.nn.functional.cross_entropy``.

    Raises:
        ValueError: neither or both of ``mask`` and ``indices``, or of ``logits`` and ``probs``.

    Example:
        >>> dist = MaskedCategorical(logits=torch.zeros(3), mask=torch.tensor([True, False, True]))
        >>> dist.probs, dist.log_prob(torch.tensor(1))
        (tensor([0.5000, 0.0000, 0.5000]), tensor(-inf))
    """

    def __init__(
        self,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        indices: Tensor | None = None,
        neg_inf: float = float("-inf"),
        padding_value: int | None = None,
        use_cross_entropy: bool = True,
    ) -> None:
        if (mask is None) is (indices is None):
            raise ValueError(
                f"mask: expected a mask or indices, got {'neither' if mask is None else 'both'}. Pass one."
            )
        if (logits is None) is (probs is None):
            raise ValueError(
                f"logits: expected logits or probs, got {'neither' if probs is None else 'both'}. Pass one."
            )
        if probs is not None:
            allowed: Any = mask
            if indices is not None:
                allowed = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, indices, True)
            probs = probs.masked_fill(~allowed, 0)
            logits = (probs / probs.sum(-1, True)).log()
        assert logits is not None
        self.num_samples = logits.shape[-1]
        self.neg_inf, self.use_cross_entropy = neg_inf, use_cross_entropy
        self._allowed, self._indices, self._padding = mask, indices, padding_value
        super().__init__(logits=self._masked(logits), validate_args=False)

    def _masked(self, logits: Tensor) -> Tensor:
        if self._indices is None:
            return logits.masked_fill(~self.mask, self.neg_inf)
        if self._padding is None:
            return logits.gather(-1, self._indices)
        padding = self._indices == self._padding
        return logits.gather(-1, self._indices.masked_fill(padding, 0)).masked_fill(padding, self.neg_inf)

    @property
    def padding_value(self) -> int:
        """The index that stands for none."""
        return 0 if self._padding is None else self._padding

    @property
    def mask(self) -> Tensor:
        """Bool ``[*batch, n]``.

        Raises:
            ValueError: the distribution was made from indices.
        """
        if self._allowed is None:
            raise ValueError("mask: this MaskedCategorical was made from indices. Pass mask= to have one.")
        return self._allowed

    @property
    def mode(self) -> Tensor:
        """int64 ``[*batch]``."""
        return self._outcome(super().mode)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mode."""
        return self.mode

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """int64 ``[*sample_shape, *batch]``."""
        return self._outcome(super().sample(torch.Size(sample_shape or ())))

    def log_prob(self, value: Tensor) -> Tensor:
        """``[*batch]``; ``neg_inf`` for outcomes that are not allowed."""
        if self._indices is not None:
            match = self._indices == value.unsqueeze(-1)
            score = super().log_prob(match.int().argmax(-1))
            return score.masked_fill(~match.any(-1), self.neg_inf)
        return score_masked(self.logits, value, self.neg_inf, self.use_cross_entropy)

    def entropy(self) -> Tensor:
        """``[*batch]``, over the outcomes that are allowed."""
        logits = self.logits.clamp(min=torch.finfo(self.logits.dtype).min)
        logits = logits - logits.logsumexp(-1, True)
        return -(logits * logits.exp()).sum(-1)

    def _outcome(self, place: Tensor) -> Tensor:
        if self._indices is None:
            return place
        indices = self._indices.expand(*place.shape, self._indices.shape[-1])
        return indices.gather(-1, place.unsqueeze(-1)).squeeze(-1)


def score_masked(logits: Tensor, value: Tensor, neg_inf: float, cross_entropy: bool) -> Tensor:
    """The log-prob of outcomes of a :class:`MaskedCategorical`.

    Args:
        logits: normalised, ``[*batch, n]``.
        value: int64 ``[*samples, *batch]``.
        neg_inf: what is given for outcomes that are not allowed.
        cross_entropy: use ``torch.nn.functional.cross_entropy``, which normalises once more.
    """
    n = logits.shape[-1]
    logits = logits.expand(*value.shape, n)
    if cross_entropy:
        score = -F.cross_entropy(logits.reshape(-1, n), value.reshape(-1), reduction="none").reshape(value.shape)
    else:
        score = logits.gather(-1, value.unsqueeze(-1)).squeeze(-1)
    return torch.where(torch.isfinite(score), score, neg_inf)
