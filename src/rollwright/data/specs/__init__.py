"""Specs: shapes, dtypes and domains of the tensors that environments and policies exchange."""

from rollwright.data.specs.composite import Composite
from rollwright.data.specs.conversion import (
    from_gym_space,
    from_torchrl,
    make_composite_from_td,
    register_as_torchrl,
    to_gym_space,
    to_gym_value,
    to_torchrl,
)
from rollwright.data.specs.discrete import Categorical, OneHot
from rollwright.data.specs.leaf import NonTensor
from rollwright.data.specs.multi import MultiCategorical, MultiOneHot
from rollwright.data.specs.numeric import (
    Binary,
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from rollwright.data.specs.shapes import BitSpace, IntervalSpace, OutcomeSpace, OutcomeSpaces, Space
from rollwright.data.specs.spec import TensorSpec
from rollwright.data.specs.stacks import Stacked, StackedComposite, stack

__all__ = [
    "Binary",
    "BitSpace",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "Composite",
    "IntervalSpace",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "OutcomeSpace",
    "OutcomeSpaces",
    "Space",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "from_gym_space",
    "from_torchrl",
    "make_composite_from_td",
    "register_as_torchrl",
    "stack",
    "to_gym_space",
    "to_gym_value",
    "to_torchrl",
]
