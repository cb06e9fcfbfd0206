"""Fake environments, policies and modules for tests, under the names that the field's tests use.

They are small but real: wrong actions raise, partial resets reset only the marked rows.

==================================  =================================================================
``CountingEnv``                     counts its actions; done above ``max_steps``
``IncrementingEnv``                 counts every step
``CountingBatchedEnv``              rows with limits of their own: episodes of different lengths
``CountingEnvWithString``           a random string beside the count
``CountingEnvCountPolicy``          the action 1, as a policy; ``CountingEnvCountModule`` as a module
``StateLessCountingEnv``            no state, any batch size; with truncated flags
``MockSerialEnv``                   a count from the seed on, that resets leave alone
``MockBatchedLockedEnv``            the same for a batch, ``MockBatchedUnLockedEnv`` for any batch
``DiscreteActionVecMockEnv``        seven numbers, one-hot actions (``...Conv...``: images)
``ContinuousActionVecMockEnv``      seven numbers, bounded actions (``...Conv...``: images)
``DiscreteActionVecPolicy``         one-hot actions from seven numbers (``...Conv...``: from images)
``NestedCountingEnv``               observation, action, reward, flags in a nest, each on demand
``MultiAgentCountingEnv``           entries by group and agent; a flag of another name at the root
``MockNestedResetEnv``              agents' flags against the root's
``MultiKeyCountingEnv``             three actions and rewards (``MultiKeyCountingEnvPolicy``)
``HeterogeneousCountingEnv``        agents of different shapes (``HeterogeneousCountingEnvPolicy``)
``EnvWithMetadata``                 an object in the state
``EnvWithDynamicSpec``              observations that grow
``EnvWithScalarAction``             actions without a dimension of their own
``EnvThatDoesNothing``              no entries but flags
``EnvThatErrorsAfter10Iters``       raises in its eleventh step
``Str2StrEnv``                      strings for observations and actions
``FastImageEnv``                    one image for ever
``DummyStrDataLoader``              random strings as prompts; ``DummyTensorDataLoader``: random tokens
``ActionObsMergeLinear``            a linear layer on action and observation
==================================  =================================================================
"""

from rollwright.testing._fakes import (
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvCountPolicy,
    CountingEnvWithString,
    IncrementingEnv,
)
from rollwright.testing._nested_fakes import (
    HeterogeneousCountingEnv,
    HeterogeneousCountingEnvPolicy,
    MockNestedResetEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    MultiKeyCountingEnvPolicy,
    NestedCountingEnv,
)
from rollwright.testing._odd_fakes import (
    ActionObsMergeLinear,
    CountingEnvCountModule,
    EnvThatDoesNothing,
    EnvThatErrorsAfter10Iters,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    EnvWithScalarAction,
    FastImageEnv,
    MockBatchedLockedEnv,
    MockBatchedUnLockedEnv,
    MockSerialEnv,
    StateLessCountingEnv,
    Str2StrEnv,
)
from rollwright.testing._vector_fakes import (
    ContinuousActionConvMockEnv,
    ContinuousActionVecMockEnv,
    DiscreteActionConvMockEnv,
    DiscreteActionConvPolicy,
    DiscreteActionVecMockEnv,
    DiscreteActionVecPolicy,
)
from rollwright.testing.dataloaders import DummyStrDataLoader, DummyTensorDataLoader

__all__ = [
    "ActionObsMergeLinear",
    "ContinuousActionConvMockEnv",
    "ContinuousActionVecMockEnv",
    "CountingBatchedEnv",
    "CountingEnv",
    "CountingEnvCountModule",
    "CountingEnvCountPolicy",
    "CountingEnvWithString",
    "DiscreteActionConvMockEnv",
    "DiscreteActionConvPolicy",
    "DiscreteActionVecMockEnv",
    "DiscreteActionVecPolicy",
    "DummyStrDataLoader",
    "DummyTensorDataLoader",
    "EnvThatDoesNothing",
    "EnvThatErrorsAfter10Iters",
    "EnvWithDynamicSpec",
    "EnvWithMetadata",
    "EnvWithScalarAction",
    "FastImageEnv",
    "HeterogeneousCountingEnv",
    "HeterogeneousCountingEnvPolicy",
    "IncrementingEnv",
    "MockBatchedLockedEnv",
    "MockBatchedUnLockedEnv",
    "MockNestedResetEnv",
    "MockSerialEnv",
    "MultiAgentCountingEnv",
    "MultiKeyCountingEnv",
    "MultiKeyCountingEnvPolicy",
    "NestedCountingEnv",
    "StateLessCountingEnv",
    "Str2StrEnv",
]
