"""Draws from distributions: without building an object, and from one that is built at each step."""

from rollwright.policies.draws.basic import CategoricalDraw, DeltaDraw, NormalDraw, race
from rollwright.policies.draws.built import Built, scores_its_draw
from rollwright.policies.draws.masked import MaskedDraw
from rollwright.policies.draws.squashed import TanhNormalDraw

__all__ = [
    "Built",
    "CategoricalDraw",
    "DeltaDraw",
    "MaskedDraw",
    "NormalDraw",
    "TanhNormalDraw",
    "race",
    "scores_its_draw",
]
