"""Distributions of actions that torch does not have, or has with other conventions."""

from tensordict.nn.distributions import Delta

from rollwright.modules.distributions.continuous import IndependentNormal, TanhDelta, TanhNormal
from rollwright.modules.distributions.discrete import MaskedCategorical, OneHotCategorical
from rollwright.modules.distributions.truncated_normal import TruncatedNormal

__all__ = [
    "Delta",
    "IndependentNormal",
    "MaskedCategorical",
    "OneHotCategorical",
    "TanhDelta",
    "TanhNormal",
    "TruncatedNormal",
]
