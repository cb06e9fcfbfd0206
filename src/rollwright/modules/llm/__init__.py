"""Language models as policies.

Nothing here imports transformers or vLLM before a model is built by name or generates.
"""

from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.modules.llm.distribution import TokenDistribution
from rollwright.modules.llm.engine import Completion, Engine, Request, Sampling
from rollwright.modules.llm.sampling import token_log_probs
from rollwright.modules.llm.serving.replicas import Replicas
from rollwright.modules.llm.serving.servers import AsyncSGLang
from rollwright.modules.llm.serving.vllm import AsyncVLLM
from rollwright.modules.llm.transformers_engine import TransformersEngine
from rollwright.modules.llm.transformers_wrapper import TransformersWrapper
from rollwright.modules.llm.vllm_wrapper import SGLangWrapper, vLLMWrapper
from rollwright.modules.llm.wrapper import Keys

__all__ = [
    "AsyncSGLang",
    "AsyncVLLM",
    "Completion",
    "Engine",
    "Keys",
    "Replicas",
    "Request",
    "SGLangWrapper",
    "Sampling",
    "TokenDistribution",
    "TransformersEngine",
    "TransformersWrapper",
    "token_log_probs",
    "vLLMWrapper",
]

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        raise missing_name(__name__, name)
