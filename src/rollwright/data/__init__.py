"""What a frame is: the specs that describe it and the names of its entries."""

from rollwright.data.compact import restore_next
from rollwright.data.layout import split_trajectories
from rollwright.data.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Stacked,
    StackedComposite,
    TensorSpec,
    Unbounded,
    from_gym_space,
    stack,
    to_gym_space,
    to_gym_value,
)

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "from_gym_space",
    "restore_next",
    "split_trajectories",
    "stack",
    "to_gym_space",
    "to_gym_value",
]
