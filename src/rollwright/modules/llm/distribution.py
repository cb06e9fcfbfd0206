"""The distribution of the tokens of given sequences."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributions import Distribution

from rollwright.modules.llm.engine import Sampling
from rollwright.modules.llm.sampling import NO_PENALTIES, restrict, token_log_probs


class TokenDistribution(Distribution):
    """A categorical distribution for each token of padded sequences.

    Args:
        logits: of each token, float ``[*batch, tokens, vocab]``: those at place t were computed from the tokens before
            t. Those of the first token mean nothing.
        mask: bool ``[*batch, tokens]``: which tokens count; False at padding and at the first token.
        sampling: of which log-probabilities are, by its mode.

    Raises:
        ValueError: ``sampling`` has penalties, and its mode is ``"sampled"``.

    Example:
        >>> logits = torch.zeros(1, 3, 4)
        >>> dist = TokenDistribution(logits, torch.tensor([[False, True, True]]), Sampling())
        >>> dist.log_prob(torch.tensor([[0, 1, 2]])).exp(), dist.entropy().exp()
        (tensor([[1.0000, 0.2500, 0.2500]]), tensor([[1., 4., 4.]]))
    """

    arg_constraints: ClassVar[Any] = {}

    def __init__(self, logits: torch.Tensor, mask: torch.Tensor, sampling: Sampling) -> None:
        if sampling.penalises and sampling.log_prob_mode == "sampled":
            raise ValueError(NO_PENALTIES.format("sampling"))
        self.logits, self.mask, self._sampling = logits, mask, sampling
        super().__init__(logits.shape[:-1], validate_args=False)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of tokens, float32 ``[*batch, tokens]``; 0 where the mask is False, whatever the token is.

        Args:
            value: int64 ``[*batch, tokens]``.
        """
        tokens = value.to(self.logits.device).masked_fill(~self.mask, 0)
        return token_log_probs(self.logits, tokens, self._sampling).masked_fill(~self.mask, 0.0)

    def entropy(self) -> torch.Tensor:
        """In nats, float32 ``[*batch, tokens]``; 0 where the mask is False."""
        logits = self.logits.float()
        if self._sampling.log_prob_mode == "sampled" and self._sampling.temperature > 0:
            logits = restrict(logits, self._sampling)
        log_probs = logits.log_softmax(-1)
        terms = log_probs.exp() * log_probs.clamp(min=torch.finfo(torch.float32).min)
        return -terms.sum(-1).masked_fill(~self.mask, 0.0)

    @property
    def mode(self) -> torch.Tensor:
        """The most probable tokens, int64 ``[*batch, tokens]``."""
        return self.logits.argmax(-1)

    def sample(self, sample_shape: Any = torch.Size()) -> torch.Tensor:  # noqa: B008
        """Not offered: tokens are sampled one after another.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("sample(): these are distributions of given sequences. Use a wrapper that generates.")
