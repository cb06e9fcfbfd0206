"""Recurrent policies: modules that carry a state from step to step, and train on flat batches of pieces."""

from rollwright.modules.recurrent.cells import GRU, LSTM, GRUCell, LSTMCell
from rollwright.modules.recurrent.mode import recurrent_mode, set_recurrent_mode
from rollwright.modules.recurrent.module import GRUModule, LSTMModule

__all__ = [
    "GRU",
    "GRUCell",
    "GRUModule",
    "LSTM",
    "LSTMCell",
    "LSTMModule",
    "recurrent_mode",
    "set_recurrent_mode",
]
