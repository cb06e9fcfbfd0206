"""Specs and their domains, under the names and at the path that programs of the field import."""

from rollwright.data.specs import (
    Binary,
    BitSpace,
    Bounded,
    Categorical,
    Composite,
    IntervalSpace,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    OutcomeSpace,
    OutcomeSpaces,
    Space,
    Stacked,
    StackedComposite,
    TensorSpec,
    Unbounded,
)

__all__ = [
    "Binary",
    "BinaryBox",
    "Bounded",
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
]

Box = Space
BinaryBox = BitSpace
BoxList = OutcomeSpaces
CategoricalBox = OutcomeSpace
ContinuousBox = IntervalSpace
DiscreteBox = OutcomeSpace
