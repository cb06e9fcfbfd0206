"""Kernels of recurrent layers over pieces, chosen for speed by length and device.

Pieces of one length are one dense call of the layer. Others are packed: on the CPU through the loop of
:mod:`~rollwright.modules.recurrent.gru_loop` for a GRU, and in a few dense calls of ever fewer pieces for an LSTM;
elsewhere as a ``PackedSequence``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from rollwright.modules.recurrent.cells import GRU, LSTM, States, gru_step, layer_weights, lstm_step, run_cells
from rollwright.modules.recurrent.gru_loop import gru_layer
from rollwright.modules.recurrent.pieces import PackedFrames, Pieces, Stairs

HOLD = 1e4  # argument of a sigmoid that makes it 0 or 1 to the last bit
MOST_CELL_ROWS = 32  # up to here, torch's LSTM cell takes a step faster than its layer (measured on a CPU)


def take_step(rnn: nn.RNNBase, x: Tensor, states: States) -> tuple[Tensor, States]:
    """Take one step of each of ``N`` sequences.

    Args:
        rnn: forward in time, batch first.
        x: ``[N, F]``.
        states: each ``[N, layers, size]``.

    Returns:
        Outputs ``[N, H]``, and next states, shaped as ``states``.
    """
    few = x.shape[0] <= MOST_CELL_ROWS and not rnn.proj_size
    if x.device.type != "cpu" or not (type(rnn) is nn.GRU or (type(rnn) is nn.LSTM and few)):
        y, after = _call_dense(rnn, x.unsqueeze(1), states)
        return y.squeeze(1), after
    layers: list[States] = []
    for layer, now in enumerate(zip(*(state.unbind(1) for state in states), strict=True)):
        if layer:
            x = functional.dropout(x, rnn.dropout, rnn.training)
        weights = layer_weights(rnn, layer)
        layers.append((torch.gru_cell(x, *now, *weights),) if len(now) == 1 else torch.lstm_cell(x, now, *weights))
        x = layers[-1][0]
    return x, tuple(torch.stack(parts, 1) for parts in zip(*layers, strict=True))


def run_pieces(rnn: nn.RNNBase, x: Tensor, states: States, pieces: Pieces) -> tuple[Tensor, States]:
    """Run ``rnn`` over pieces, each from its first state.

    Args:
        rnn: forward in time, batch first.
        x: ``[N, F]``.
        states: first states, each ``[S, layers, size]``.
        pieces: ``S`` of them, over ``N`` frames.

    Returns:
        Outputs ``[N, H]``, and states after each piece's last frame, shaped as ``states``.
    """
    if pieces.length is not None:
        y, finals = _call_dense(rnn, x.unflatten(0, (len(pieces), pieces.length)), states)
        return y.flatten(0, 1), finals
    ordered = tuple(state.index_select(0, pieces.order).transpose(0, 1).contiguous() for state in states)
    y, finals = _run_ragged(rnn, x, ordered, pieces)
    return y, tuple(state.transpose(0, 1).index_select(0, pieces.rank) for state in finals)


def _call_dense(rnn: nn.RNNBase, x: Tensor, states: States) -> tuple[Tensor, States]:
    """The layer's own call: ``x [B, T, F]``, states and their successors ``[B, layers, size]``."""
    given = tuple(state.transpose(0, 1).contiguous() for state in states)
    y, finals = rnn(x, given[0] if len(given) == 1 else given)
    return y, tuple(state.transpose(0, 1) for state in ((finals,) if len(given) == 1 else finals))


def _run_ragged(rnn: nn.RNNBase, x: Tensor, states: States, pieces: Pieces) -> tuple[Tensor, States]:
    """Pieces of several lengths; states ``[layers, S, size]`` in the order of ``pieces.order``."""
    written_out = isinstance(rnn, GRU | LSTM)
    on_cpu = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if on_cpu and type(rnn) is nn.LSTM:
        return _lstm_stairs(rnn, x, states, pieces)
    packing = PackedFrames.of(pieces)
    packed = _reordered(x, packing.rows, packing.place)
    if written_out:
        y, finals = run_cells(rnn, gru_step if len(states) == 1 else lstm_step, packed, packing.sizes, states)
    elif on_cpu and type(rnn) is nn.GRU:
        y, finals = _gru_loop(rnn, packed, states, packing, pieces)
    else:
        sequence = PackedSequence(packed, torch.tensor(packing.sizes, device="cpu"))
        out, last = rnn(sequence, states[0] if len(states) == 1 else states)
        y, finals = out.data, (last,) if len(states) == 1 else last
    return _restored(y, packing.place), finals


class _Reordered(torch.autograd.Function):
    """Frames in the order of a kernel; only the real ones, each at one place, have a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


class _Restored(torch.autograd.Function):
    """Frames from their places in the order of a kernel, each of which is one frame's or padding."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = y.shape[0]
        return y.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_add_(0, place, grad), None


def _reordered(x: Tensor, rows: Tensor, place: Tensor) -> Tensor:
    return cast(Tensor, _Reordered.apply(x, rows, place))  # type: ignore[no-untyped-call]


def _restored(y: Tensor, place: Tensor) -> Tensor:
    return cast(Tensor, _Restored.apply(y, place))  # type: ignore[no-untyped-call]


def _gru_loop(rnn: nn.GRU, x: Tensor, states: States, packing: PackedFrames, pieces: Pieces) -> tuple[Tensor, States]:
    last = packing.place[pieces.last[pieces.order]]
    finals = []
    for layer in range(rnn.num_layers):
        if layer:
            x = functional.dropout(x, rnn.dropout, rnn.training)
        x = gru_layer(x, packing.sizes, states[0][layer], layer_weights(rnn, layer))
        finals.append(x.index_select(0, last))
    return x, (torch.stack(finals),)


def _lstm_stairs(rnn: nn.LSTM, x: Tensor, states: States, pieces: Pieces) -> tuple[Tensor, States]:
    """Dense calls, one a segment.

    The cell of a piece that has ended stays as it is until the segment's end, to the bit: a further column of the
    input says so, whose weights shut the entry gate and open the forget gate. No gradient comes out of padding.
    """
    stairs = Stairs.of(pieces)
    last = stairs.place[pieces.last[pieces.order]]
    y = _reordered(x, stairs.rows, stairs.place)
    hold = stairs.padded.to(y.dtype).unsqueeze(-1)
    last_h, last_c = [], []
    for layer in range(rnn.num_layers):
        if layer:
            y = functional.dropout(y, rnn.dropout, rnn.training)
        w_ih, *others = layer_weights(rnn, layer)
        shut_open = w_ih.new_zeros(4, rnn.hidden_size, 1)
        shut_open[0], shut_open[1] = -HOLD, HOLD
        weights = [torch.cat([w_ih, shut_open.flatten(0, 1)], 1), *others]
        y, cells = _climb(rnn, torch.cat([y, hold], 1), states[0][layer], states[1][layer], weights, stairs)
        last_h.append(y.index_select(0, last))
        last_c.append(cells)
    return _restored(y, stairs.place), (torch.stack(last_h), torch.stack(last_c))


def _climb(
    rnn: nn.LSTM, x: Tensor, h: Tensor, c: Tensor, weights: list[Tensor], stairs: Stairs
) -> tuple[Tensor, Tensor]:
    """One layer over all segments: outputs ``[M, H]``, and the cell after each piece's last frame, ``[S, H]``."""
    outputs, cells = [], []
    for segment, part in zip(stairs.segments, x.split([s.num_rows for s in stairs.segments]), strict=True):
        n = segment.count
        if n < c.shape[0]:
            cells.append(c[n:])
            h, c = h[:n], c[:n]
        y, h_n, c_n = torch.lstm(
            part.unflatten(0, (-1, n)),
            (h.unsqueeze(0).contiguous(), c.unsqueeze(0).contiguous()),
            weights,
            rnn.bias,
            1,
            0.0,
            rnn.training,
            False,
            False,
        )
        h, c = h_n.squeeze(0), c_n.squeeze(0)
        outputs.append(y.flatten(0, 1))
    return torch.cat(outputs), torch.cat([c, *reversed(cells)])
