"""MaskedDraw: one of the outcomes that a mask allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollwright.modules.distributions.discrete import score_masked
from rollwright.policies.draws.basic import normalised, race
from rollwright.policies.nodes import Draw, Step, Values

__all__ = ["MaskedDraw"]


@dataclass(frozen=True)
class MaskedDraw(Draw):
    """``MaskedCategorical``; reads logits and a mask, writes an outcome and perhaps its log-prob.

    Attributes:
        neg_inf: the logit of outcomes that are not allowed.
        cross_entropy: how log-probs are computed.
    """

    neg_inf: float
    cross_entropy: bool

    nan_shows = None
    in_torch = True
    draws = True

    def step(self) -> Step:
        """See :class:`Node`."""
        (logits_at, mask_at), action, scored = self.reads, self.writes[0], self.writes[1:]
        neg_inf, cross = self.neg_inf, self.cross_entropy

        def run(values: Values) -> None:
            logits = values[logits_at].masked_fill(~values[mask_at], neg_inf)
            normal = normalised(logits)
            p = normal.softmax(-1)
            if bool(torch.isnan(p).any()):
                torch.multinomial(p.reshape(-1, p.shape[-1]), 1, True)  # says what is wrong
            values[action] = index = race(p).squeeze(-1)
            for slot in scored:
                values[slot] = score_masked(normal, index, neg_inf, cross)

        return run
