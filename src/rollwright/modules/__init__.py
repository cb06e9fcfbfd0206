"""Policies and what they are made of."""

from importlib import import_module
from typing import TYPE_CHECKING

from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor
from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from rollwright._missing import missing_name
from rollwright.modules.distributions import (
    Delta,
    IndependentNormal,
    MaskedCategorical,
    OneHotCategorical,
    TanhDelta,
    TanhNormal,
    TruncatedNormal,
)
from rollwright.modules.primers import get_env_transforms_from_module, get_primers_from_module
from rollwright.modules.random_policy import RandomPolicy
from rollwright.modules.recurrent import (
    GRU,
    LSTM,
    GRUCell,
    GRUModule,
    LSTMCell,
    LSTMModule,
    recurrent_mode,
    set_recurrent_mode,
)
from rollwright.modules.tensordict_module import (
    Actor,
    ActorValueOperator,
    AdditiveGaussianModule,
    EGreedyModule,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    QValueModule,
    SafeModule,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
    SafeSequential,
    TanhModule,
    ValueOperator,
    set_exploration_modules_spec_from_env,
)

if TYPE_CHECKING:
    from rollwright.modules.llm import AsyncVLLM, TransformersWrapper, vLLMWrapper

__all__ = [
    "Actor",
    "ActorValueOperator",
    "AddStateIndependentNormalScale",
    "AdditiveGaussianModule",
    "AsyncVLLM",
    "Delta",
    "EGreedyModule",
    "ExplorationType",
    "GRU",
    "GRUCell",
    "GRUModule",
    "IndependentNormal",
    "LSTM",
    "LSTMCell",
    "LSTMModule",
    "MaskedCategorical",
    "NormalParamExtractor",
    "OneHotCategorical",
    "OrnsteinUhlenbeckProcessModule",
    "ProbabilisticActor",
    "QValueActor",
    "QValueModule",
    "RandomPolicy",
    "SafeModule",
    "SafeProbabilisticModule",
    "SafeProbabilisticTensorDictSequential",
    "SafeSequential",
    "TanhDelta",
    "TanhModule",
    "TanhNormal",
    "TransformersWrapper",
    "TruncatedNormal",
    "ValueOperator",
    "exploration_type",
    "get_env_transforms_from_module",
    "get_primers_from_module",
    "recurrent_mode",
    "set_exploration_modules_spec_from_env",
    "set_exploration_type",
    "set_recurrent_mode",
    "vLLMWrapper",
]

_LANGUAGE_MODELS = ("AsyncVLLM", "TransformersWrapper", "vLLMWrapper")  # imported when they are asked for

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        if name in _LANGUAGE_MODELS:
            globals()[name] = getattr(import_module("rollwright.modules.llm"), name)
            return globals()[name]
        raise missing_name(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
