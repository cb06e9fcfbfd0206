"""Policies and what they are made of."""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from rollwright.modules.llm import TransformersWrapper, vLLMWrapper

__all__ = [
    "GRU",
    "GRUCell",
    "GRUModule",
    "LSTM",
    "LSTMCell",
    "LSTMModule",
    "RandomPolicy",
    "TransformersWrapper",
    "recurrent_mode",
    "set_recurrent_mode",
    "vLLMWrapper",
]

_LANGUAGE_MODELS = ("TransformersWrapper", "vLLMWrapper")  # imported when they are asked for

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        if name in _LANGUAGE_MODELS:
            globals()[name] = getattr(import_module("rollwright.modules.llm"), name)
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
