"""Modules on TensorDicts: actors, values of actions, exploration."""

from rollwright.modules.tensordict_module.actors import (
    Actor,
    ActorValueOperator,
    ProbabilisticActor,
    QValueActor,
    TanhModule,
    ValueOperator,
)
from rollwright.modules.tensordict_module.exploration import (
    AdditiveGaussianModule,
    EGreedyModule,
    OrnsteinUhlenbeckProcessModule,
    set_exploration_modules_spec_from_env,
)
from rollwright.modules.tensordict_module.qvalue import QValueModule
from rollwright.modules.tensordict_module.safe import (
    SafeModule,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
    SafeSequential,
)

__all__ = [
    "Actor",
    "ActorValueOperator",
    "AdditiveGaussianModule",
    "EGreedyModule",
    "OrnsteinUhlenbeckProcessModule",
    "ProbabilisticActor",
    "QValueActor",
    "QValueModule",
    "SafeModule",
    "SafeProbabilisticModule",
    "SafeProbabilisticTensorDictSequential",
    "SafeSequential",
    "TanhModule",
    "ValueOperator",
    "set_exploration_modules_spec_from_env",
]
