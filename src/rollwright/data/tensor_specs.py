"""Specs and their domains, under the names and at the path that programs of the field import."""

from rollwright.data.specs import (
    Binary,
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
    Stacked,
    StackedComposite,
    TensorSpec,
    Unbounded,
)

__all__ = [
    "Binary",
    "Bounded",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "Composite",
    "ContinuousBox",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
]

BoxList = OutcomeSpaces
CategoricalBox = OutcomeSpace
ContinuousBox = IntervalSpace
