"""One step of a GRU or LSTM as a node of a policy on arrays: our recurrent modules, and TorchRL's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rollwright._keys import NestedKey, unravel
from rollwright.errors import NotNative
from rollwright.modules import GRUModule, LSTMModule
from rollwright.modules.recurrent.kernels import MOST_CELL_ROWS, take_step
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.nodes import Node, Step, Values
from rollwright.policies.traced.in_numpy import linear_numpy

_OF_TORCHRL = "torchrl.modules.tensordict_module.rnn"


@dataclass(frozen=True)
class Recurrent:
    """A recurrent module, as far as it is read.

    Attributes:
        module: a TensorDict module.
        rnn: its layer.
        in_keys: of input and states, and for a module of TorchRL of the mark of first steps.
        out_keys: of the output and the next states.
        restarts: whether the module itself sets states to zero at first steps.
    """

    module: Any
    rnn: nn.RNNBase
    in_keys: list[NestedKey]
    out_keys: list[NestedKey]
    restarts: bool


def find_recurrent(module: Any) -> Recurrent | None:
    """What there is to know of a recurrent module; None for other modules.

    Raises:
        NotNative: it is one of TorchRL, set to what this form does not do.
    """
    kind = type(module)
    if kind in (GRUModule, LSTMModule):
        rnn = module.gru if kind is GRUModule else module.lstm
        found = Recurrent(module, rnn, list(module.in_keys[:-1]), list(module.out_keys), False)
    elif kind.__module__ == _OF_TORCHRL and kind.__name__ in ("GRUModule", "LSTMModule"):
        rnn = module.gru if kind.__name__ == "GRUModule" else module.lstm
        if module.recurrent_mode:
            raise NotNative(f"TorchRL's {kind.__name__} is in recurrent mode")
        if type(rnn) not in (nn.GRU, nn.LSTM) or not rnn.batch_first or rnn.bidirectional:
            raise NotNative(f"TorchRL's {kind.__name__} has a {type(rnn).__name__} that it writes out")
        keys = list(map(unravel, module.in_keys))
        count = 2 if type(rnn) is nn.GRU else 3
        found = Recurrent(module, rnn, [*keys[:count], "is_init"], list(map(unravel, module.out_keys)), True)
    else:
        return None
    if any(name not in vars(rnn)["_parameters"] for name in _names(rnn)):
        raise NotNative(f"weights of a {type(rnn).__name__} are no parameters of it")
    return found


def _names(rnn: nn.RNNBase) -> list[str]:
    """Of all weights, in the order of torch's functions."""
    kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if rnn.bias else [])]
    kinds += ["weight_hr"] if rnn.proj_size else []
    return [f"{kind}_l{layer}" for layer in range(rnn.num_layers) for kind in kinds]


@dataclass(frozen=True)
class RecurrentStep(Node):
    """One step of each environment; states are read and written as entries.

    Attributes:
        of: the module.
        batch: the batch size of the entries.
    """

    of: Recurrent
    batch: tuple[int, ...]

    transient: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """The module."""
        return type(self.of.module).__name__

    def step(self) -> Step:
        """Call torch's cell, or its layer, as the module does."""
        if self.of.restarts:
            return self._dense()
        rnn, rows = self.of.rnn, math.prod(self.batch)
        few = rows <= MOST_CELL_ROWS and not rnn.proj_size
        if rnn.num_layers == 1 and (type(rnn) is nn.GRU or (type(rnn) is nn.LSTM and few)):
            return self._cell()
        batch, reads, writes = self.batch, self.reads, self.writes

        def run(values: Values) -> None:
            x, *states = (values[slot] for slot in reads)
            states = [state.reshape(-1, *state.shape[-2:]) for state in states]
            y, after = take_step(rnn, x.reshape(rows, x.shape[-1]), tuple(states))
            for slot, value in zip(writes, (y, *after), strict=True):
                values[slot] = value.reshape(*batch, *value.shape[1:]).clone()

        return run

    def _cell(self) -> Step:
        """A single layer."""
        source, *states = self.reads
        rnn, rows = self.of.rnn, math.prod(self.batch)
        weights, names = vars(rnn)["_parameters"], _names(rnn)
        width, size = rnn.input_size, rnn.hidden_size
        flat, layered = (*self.batch, size), (*self.batch, 1, size)

        output, *successors = self.writes
        one_dimension = len(self.batch) == 1  # which needs no reshape

        def gru(values: Values) -> None:
            x = values[source]
            x = x if one_dimension and x.ndim == 2 else x.reshape(rows, width)
            h = torch.gru_cell(x, values[states[0]].reshape(rows, size), *[weights[name] for name in names])
            values[output] = h if one_dimension else h.reshape(flat)
            values[successors[0]] = h.clone().reshape(layered)

        def lstm(values: Values) -> None:
            x = values[source]
            x = x if one_dimension and x.ndim == 2 else x.reshape(rows, width)
            given = tuple(values[slot].reshape(rows, size) for slot in states)
            h, c = torch.lstm_cell(x, given, *[weights[name] for name in names])
            values[output] = h if one_dimension else h.reshape(flat)
            values[successors[0]], values[successors[1]] = h.clone().reshape(layered), c.reshape(layered)

        return gru if type(rnn) is nn.GRU else lstm

    def _dense(self) -> Step:
        """A layer's own function, with states that are zero at first steps, as TorchRL's modules call it."""
        source, *states, mark = self.reads
        rnn, rows, batch = self.of.rnn, math.prod(self.batch), self.batch
        weights, names = vars(rnn)["_parameters"], _names(rnn)
        function: Any = torch.gru if type(rnn) is nn.GRU else torch.lstm

        def run(values: Values) -> None:
            first = values[mark].reshape(rows)
            given = [values[slot].reshape(rows, *values[slot].shape[-2:]) for slot in states]
            if first.any():
                given = [torch.where(first[:, None, None], 0, state) for state in given]
            given = [state.transpose(0, 1).contiguous() for state in given]
            x = values[source].reshape(rows, 1, -1)
            settings = (rnn.bias, rnn.num_layers, rnn.dropout, rnn.training, False, True)
            hidden = given if len(given) > 1 else given[0]
            y, *after = function(x, hidden, [weights[name] for name in names], *settings)
            values[self.writes[0]] = y.reshape(*batch, y.shape[-1])
            for slot, state in zip(self.writes[1:], after, strict=True):
                value = state.transpose(0, 1)
                values[slot] = value.reshape(*batch, *value.shape[1:]).clone()

        return run

    def checked_step(self) -> Step:
        """The module itself, which tests shapes."""
        of, size = self.of, torch.Size(self.batch)

        def run(values: Values) -> None:
            given = {key: values[slot] for key, slot in zip(of.in_keys, self.reads, strict=True)}
            done = of.module(TensorDict(given, batch_size=size))
            for key, slot in zip(of.out_keys, self.writes, strict=True):
                value: Tensor = done.get(key)
                values[slot] = value.clone()

        return run

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Append the calls that do it in NumPy; the results."""
        rnn = self.of.rnn
        x, *states = reads[:-1] if self.of.restarts else reads
        if type(rnn) not in (nn.GRU, nn.LSTM) or rnn.proj_size:
            raise NotNative(f"{type(rnn).__name__} with such settings is not known in NumPy")
        if rnn.num_layers > 1 and rnn.dropout and rnn.training:
            raise NotNative("dropout between layers is not known in NumPy")
        if any(value.dtype != x.dtype for value in states) or x.dtype not in (np.float32, np.float64):
            raise NotNative(f"{self.label} reads {x.dtype}")
        if self.of.restarts:
            states = [_restarted(emitter, state, reads[-1]) for state in states]
        after = [np.empty(state.shape, state.dtype) for state in states]
        emit = _emit_gru if type(rnn) is nn.GRU else _emit_lstm
        for layer in range(rnn.num_layers):
            now, then = ([value[..., layer, :] for value in values] for values in (states, after))
            emit(emitter, rnn, layer, x, now, then)
            x = then[0]
        return [x, *after]


def _restarted(emitter: Emitter, state: Array, mark: Array) -> Array:
    """A state that is zero where ``mark`` is True."""
    own = np.empty(state.shape, state.dtype)
    emitter.put(np.copyto, own, state)
    emitter.put(np.copyto, own, 0, where=mark[..., None])
    return own


def _gates(emitter: Emitter, rnn: nn.RNNBase, layer: int, which: str, x: Array) -> Array:
    weight = emitter.parameter(rnn._parameters, f"weight_{which}_l{layer}", x.dtype)
    bias = emitter.parameter(rnn._parameters, f"bias_{which}_l{layer}", x.dtype) if rnn.bias else None
    return linear_numpy(emitter, weight, bias, x)


def _sigmoid(emitter: Emitter, x: Array) -> None:
    """In place, as ``(tanh(x / 2) + 1) / 2``."""
    for function, number in ((np.multiply, 0.5), (np.tanh, None), (np.multiply, 0.5), (np.add, 0.5)):
        emitter.put(function, x, *([] if number is None else [number]), x)


def _emit_gru(emitter: Emitter, rnn: nn.RNNBase, layer: int, x: Array, now: list[Array], then: list[Array]) -> None:
    (h,), (out,), size = now, then, rnn.hidden_size
    given, carried = _gates(emitter, rnn, layer, "ih", x), _gates(emitter, rnn, layer, "hh", h)
    gates, new, of_state = given[..., : 2 * size], given[..., 2 * size :], carried[..., 2 * size :]
    emitter.put(np.add, gates, carried[..., : 2 * size], gates)
    _sigmoid(emitter, gates)
    emitter.put(np.multiply, of_state, gates[..., :size], of_state)
    emitter.put(np.add, new, of_state, new)
    emitter.put(np.tanh, new, new)
    emitter.put(np.subtract, h, new, out)
    emitter.put(np.multiply, out, gates[..., size:], out)
    emitter.put(np.add, out, new, out)


def _emit_lstm(emitter: Emitter, rnn: nn.RNNBase, layer: int, x: Array, now: list[Array], then: list[Array]) -> None:
    (h, c), (h_out, c_out), size = now, then, rnn.hidden_size
    gates = _gates(emitter, rnn, layer, "ih", x)
    emitter.put(np.add, gates, _gates(emitter, rnn, layer, "hh", h), gates)
    entry, forget, cell, out = (gates[..., i * size : (i + 1) * size] for i in range(4))
    emitter.put(np.tanh, cell, cell)
    _sigmoid(emitter, gates[..., : 2 * size])
    _sigmoid(emitter, out)
    emitter.put(np.multiply, forget, c, c_out)
    emitter.put(np.multiply, entry, cell, entry)
    emitter.put(np.add, c_out, entry, c_out)
    emitter.put(np.tanh, c_out, h_out)
    emitter.put(np.multiply, h_out, out, h_out)
