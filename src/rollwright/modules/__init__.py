"""Policies and what they are made of."""

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

__all__ = [
    "GRU",
    "GRUCell",
    "GRUModule",
    "LSTM",
    "LSTMCell",
    "LSTMModule",
    "RandomPolicy",
    "recurrent_mode",
    "set_recurrent_mode",
]
