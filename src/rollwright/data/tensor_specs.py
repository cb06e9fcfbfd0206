"""Specs and their domains, under the names and at the path that programs of the field import."""

from rollwright.data.specs import *
from rollwright.data.specs import BitSpace, IntervalSpace, OutcomeSpace, OutcomeSpaces, Space

__all__ = [
    "Binary",
    "BinaryBox",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Box",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "Composite",
    "ContinuousBox",
    "DiscreteBox",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
]

Box = Space
BinaryBox = BitSpace
BoxList = OutcomeSpaces
CategoricalBox = OutcomeSpace
ContinuousBox = IntervalSpace
DiscreteBox = OutcomeSpace
