"""Recurrent modules, at the path that programs of the field import."""

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

__all__ = ["GRU", "GRUCell", "GRUModule", "LSTM", "LSTMCell", "LSTMModule", "recurrent_mode", "set_recurrent_mode"]
