"""LSTM and GRU written out in torch operations: one step, and whole sequences over such steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

States = tuple[Tensor, ...]
Step = Callable[[Tensor, States, Sequence[Tensor]], States]


def gru_step(x: Tensor, states: States, weights: Sequence[Tensor]) -> States:
    """One step of a GRU: ``(h,)`` from ``x [B, F]``, ``(h [B, H],)`` and ``w_ih, w_hh[, b_ih, b_hh]``."""
    (h,) = states
    given = functional.linear(x, weights[0], *weights[2:3])
    carried = functional.linear(h, weights[1], *weights[3:4])
    reset_x, update_x, new_x = given.chunk(3, -1)
    reset_h, update_h, new_h = carried.chunk(3, -1)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return (new + update * (h - new),)


def lstm_step(x: Tensor, states: States, weights: Sequence[Tensor]) -> States:
    """One step of an LSTM: ``(h, c)``; ``weights`` may end with the projection ``w_hr [P, H]``."""
    h, c = states
    biased = len(weights) >= 4
    gates = functional.linear(x, weights[0], *weights[2:3][:biased])
    gates = gates + functional.linear(h, weights[1], *weights[3:4][:biased])
    entry, forget, cell, out = gates.chunk(4, -1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(entry) * torch.tanh(cell)
    h = torch.sigmoid(out) * torch.tanh(c)
    return (h if len(weights) % 2 == 0 else functional.linear(h, weights[-1])), c


def layer_weights(rnn: nn.RNNBase, layer: int) -> list[Tensor]:
    """Weights of one layer: ``w_ih, w_hh``, then ``b_ih, b_hh`` if there are biases, then the projection if any."""
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if rnn.bias else [])]
    names += ["weight_hr"] if rnn.proj_size else []
    return [getattr(rnn, f"{name}_l{layer}") for name in names]


def run_cells(rnn: nn.RNNBase, step: Step, x: Tensor, sizes: Sequence[int], states: States) -> tuple[Tensor, States]:
    """Run steps over sequences in time-major order, the longest first.

    Args:
        rnn: holds weights, and dropout between layers.
        step: of one layer.
        x: ``[sum(sizes), F]``: of step 0 of ``sizes[0]`` sequences, then of step 1 of ``sizes[1]``…
        sizes: number of sequences that have a step 0, 1…; never grows.
        states: first states, each ``[layers, sizes[0], size]``.

    Returns:
        Outputs ``[sum(sizes), H]``, and states after each sequence's last step, shaped as ``states``.
    """
    finals: list[States] = []
    for layer in range(rnn.num_layers):
        if layer:
            x = functional.dropout(x, rnn.dropout, rnn.training)
        weights = layer_weights(rnn, layer)
        now = tuple(state[layer] for state in states)
        outputs, ended = [], []
        for x_t, n in zip(x.split(list(sizes)), sizes, strict=True):
            if n < now[0].shape[0]:
                ended.append(tuple(state[n:] for state in now))
                now = tuple(state[:n] for state in now)
            now = step(x_t, now, weights)
            outputs.append(now[0])
        parts = [now, *reversed(ended)]
        finals.append(tuple(torch.cat([part[i] for part in parts]) for i in range(len(now))))
        x = torch.cat(outputs)
    return x, tuple(torch.stack(layers) for layers in zip(*finals, strict=True))


def _check_direction(rnn: nn.RNNBase) -> None:
    if rnn.bidirectional:
        raise ValueError(
            f"bidirectional: {type(rnn).__name__} runs forward in time only, and got True. Use torch.nn for the other."
        )


def _forward(rnn: nn.RNNBase, step: Step, x: Tensor, states: States | None) -> tuple[Tensor, States]:
    """As ``forward`` of the layers of torch.nn, on sequences of one length, without a batch dimension or with one."""
    if not isinstance(x, Tensor) or x.ndim not in (2, 3):
        raise TypeError(
            f"input: {type(rnn).__name__} expected a tensor of 2 or 3 dimensions, got "
            f"{list(x.shape) if isinstance(x, Tensor) else type(x).__name__}. Pad sequences of different lengths."
        )
    single = x.ndim == 2
    if single:
        x = x.unsqueeze(1)
        states = None if states is None else tuple(state.unsqueeze(1) for state in states)
    elif rnn.batch_first:
        x = x.transpose(0, 1)
    steps, batch = x.shape[:2]
    if states is None:
        widths = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 2 if step is lstm_step else 1]
        states = tuple(x.new_zeros(rnn.num_layers, batch, width) for width in widths)
    y, finals = run_cells(rnn, step, x.flatten(0, 1), [batch] * steps, states)
    y = y.unflatten(0, (steps, batch))
    if single:
        return y.squeeze(1), tuple(state.squeeze(1) for state in finals)
    return (y.transpose(0, 1) if rnn.batch_first else y), finals


class GRUCell(nn.GRUCell):
    """``torch.nn.GRUCell`` written out: the same weights by the same names, and equal values.

    Args:
        input_size: entries of the input.
        hidden_size: entries of the state.
        bias: whether there are biases.
        device: of the weights.
        dtype: of the weights.

    Example:
        >>> cell = GRUCell(3, 5)
        >>> cell(torch.randn(2, 3), torch.zeros(2, 5)).shape
        torch.Size([2, 5])
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state ``[*batch, H]``, from an input ``[*batch, F]`` and a state (zeros if None)."""
        h = input.new_zeros(*input.shape[:-1], self.hidden_size) if hx is None else hx
        return gru_step(input, (h,), _cell_weights(self))[0]


class LSTMCell(nn.LSTMCell):
    """``torch.nn.LSTMCell`` written out: the same weights by the same names, and equal values.

    Args:
        input_size: entries of the input.
        hidden_size: entries of each of the two states.
        bias: whether there are biases.
        device: of the weights.
        dtype: of the weights.

    Example:
        >>> cell = LSTMCell(3, 5)
        >>> h, c = cell(torch.randn(2, 3))
        >>> h.shape, c.shape
        (torch.Size([2, 5]), torch.Size([2, 5]))
    """

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The next ``(h, c)``, each ``[*batch, H]``, from an input ``[*batch, F]`` and states (zeros if None)."""
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = zeros, zeros
        h, c = lstm_step(input, hx, _cell_weights(self))
        return h, c


def _cell_weights(cell: nn.RNNCellBase) -> list[Tensor]:
    weights = [cell.weight_ih, cell.weight_hh]
    return weights if cell.bias_ih is None else [*weights, cell.bias_ih, cell.bias_hh]


class GRU(nn.GRU):
    """``torch.nn.GRU`` as a loop over cells in Python: the same arguments, ``state_dict`` and, to rounding, values.

    Slower than the kernel; every operation can be seen and changed.

    Raises:
        ValueError: ``bidirectional`` is True.

    Example:
        >>> y, h = GRU(3, 5, batch_first=True)(torch.randn(2, 7, 3))
        >>> y.shape, h.shape
        (torch.Size([2, 7, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_direction(self)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Outputs ``[B, T, H]`` and last states ``[layers, B, H]``; dimensions as those of ``torch.nn.GRU``."""
        y, (h,) = _forward(self, gru_step, input, None if hx is None else (hx,))
        return y, h


class LSTM(nn.LSTM):
    """``torch.nn.LSTM`` as a loop over cells in Python: the same arguments, ``state_dict`` and, to rounding, values.

    Slower than the kernel; every operation can be seen and changed.

    Raises:
        ValueError: ``bidirectional`` is True.

    Example:
        >>> y, (h, c) = LSTM(3, 5, batch_first=True)(torch.randn(2, 7, 3))
        >>> y.shape, c.shape
        (torch.Size([2, 7, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_direction(self)

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs ``[B, T, H]`` and last ``(h, c)``, each ``[layers, B, H]``; as those of ``torch.nn.LSTM``."""
        y, (h, c) = _forward(self, lstm_step, input, hx)
        return y, (h, c)
