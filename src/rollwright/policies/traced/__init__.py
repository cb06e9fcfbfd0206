"""Modules taken apart: their ``forward`` as the calls on tensors that it makes."""
