"""LSTMModule and GRUModule: recurrent layers as TensorDict modules."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from rollwright._keys import NestedKey
from rollwright.modules.recurrent.base import RecurrentModule
from rollwright.modules.recurrent.cells import GRU, LSTM
from rollwright.modules.recurrent.mode import Mode


def _ready(name: str, rnn: Any, kind: type[nn.RNNBase], settings: dict[str, Any]) -> nn.RNNBase:
    """A layer that the user made, checked."""
    given = [setting for setting, value in settings.items() if value]
    if given:
        raise ValueError(f"{name}: got a ready layer and {', '.join(given)}. Drop one of the two.")
    if not isinstance(rnn, kind):
        raise TypeError(f"{name}: expected a torch.nn.{kind.__name__}, got {type(rnn).__name__}.")
    _check_layout(rnn.batch_first, rnn.bidirectional)
    return rnn


def _check_layout(batch_first: bool, bidirectional: bool) -> None:
    if not batch_first:
        raise ValueError("batch_first: expected True, got False. Frames of a TensorDict have time last.")
    if bidirectional:
        raise ValueError(
            "bidirectional: expected False, got True. A policy acts before it has seen the steps that follow; use a "
            "torch.nn layer in a TensorDictModule for whole sequences."
        )


_BACKENDS = ("auto", "pad", "scan", "triton")


def _check_backend(backend: str, recompute: str) -> None:
    """Refuse names of backends that there are nowhere; those that there are elsewhere all mean the one that is here."""
    for name, value, known in (
        ("recurrent_backend", backend, _BACKENDS),
        ("recurrent_recompute", recompute, ("none", "full")),
    ):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}. Leave it out.")


def _check_sizes(name: str, sizes: dict[str, Any]) -> None:
    for size, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{size}: expected an integer, got {value!r}. Pass input_size and hidden_size, or {name}=.")


class GRUModule(RecurrentModule):
    """A GRU as a TensorDict module, for single steps and for batches with time.

    In *sequential* mode, the default, each element of the batch takes one step: an input ``[*batch, F]`` and a
    state ``[*batch, num_layers, H]`` give an output ``[*batch, H]`` and the next state. In *recurrent* mode, see
    :class:`~rollwright.modules.set_recurrent_mode`, the last batch dimension is time. Pieces begin at the start of
    each row (a flat batch is one row) and wherever ``is_init`` is True, each from the state stored there. Neither mode
    sets a state to zero: what the environment's primer wrote at the reset, or what was stored, is the first state.

    In recurrent mode, the next state is right after every step for one layer; for several, after the last step of
    each piece, and other frames keep the state that was recorded there, or NaN where there was none.

    Args:
        input_size: ``F``.
        hidden_size: ``H``.
        num_layers: layers on top of one another.
        bias: whether there are biases.
        batch_first: True.
        dropout: probability, between layers.
        bidirectional: False.
        python_based: write the layer out in torch operations, :class:`~rollwright.modules.GRU`.
        in_key: the input; the state is then ``"recurrent_state"``.
        in_keys: input, state and, if it is not ``"is_init"``, the mark of first steps.
        out_key: the output; the next state is then ``("next", "recurrent_state")``.
        out_keys: output and next state.
        device: of the weights.
        gru: a ready layer, instead of sizes.
        default_recurrent_mode: where no mode is set.
        recurrent_backend, recurrent_compute_dtype, recurrent_recompute, recurrent_matmul_precision: accepted for
            programs of the field; they change nothing here. Pieces run without padding, by torch's own layer.

    Raises:
        ValueError: keys are too few, too many or given twice; the layer is bidirectional or not batch first.
        TypeError: sizes are missing, or ``gru`` is no GRU.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> env = GymEnv("CartPole-v1", policy=gru)
        >>> gru(env.reset())["next", "recurrent_state"].shape
        torch.Size([1, 8])
    """

    _states = ("recurrent_state",)
    _attribute = "gru"
    _output_is_state = True

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        python_based: bool = False,
        *,
        in_key: NestedKey | None = None,
        in_keys: list[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: list[NestedKey] | None = None,
        device: torch.device | str | int | None = None,
        gru: nn.GRU | None = None,
        default_recurrent_mode: Mode = None,
        recurrent_backend: str = "auto",
        recurrent_compute_dtype: torch.dtype = torch.float32,
        recurrent_recompute: str = "none",
        recurrent_matmul_precision: str = "auto",
    ) -> None:
        _check_backend(recurrent_backend, recurrent_recompute)
        sizes = {"input_size": input_size, "hidden_size": hidden_size}
        if gru is None:
            _check_sizes("gru", sizes)
            _check_layout(batch_first, bidirectional)
            kind = GRU if python_based else nn.GRU
            rnn: nn.RNNBase = kind(
                input_size, hidden_size, num_layers, bias, batch_first=True, dropout=dropout, device=device
            )
        else:
            rnn = _ready("gru", gru, nn.GRU, {**sizes, "python_based": python_based, "device": device})
        super().__init__(rnn, (in_key, in_keys, out_key, out_keys), default_recurrent_mode)

    def make_python_based(self) -> Self:
        """Exchange the layer for :class:`~rollwright.modules.GRU`, with the same weights, in place."""
        self.exchange(GRU)
        return self

    def make_cudnn_based(self) -> Self:
        """Exchange the layer for ``torch.nn.GRU``, with the same weights, in place."""
        self.exchange(nn.GRU)
        return self


class LSTMModule(RecurrentModule):
    """An LSTM as a TensorDict module, for single steps and for batches with time.

    Modes, pieces and first states are those of :class:`~rollwright.modules.GRUModule`. There are two states, ``h``
    ``[*batch, num_layers, proj_size or H]`` and ``c`` ``[*batch, num_layers, H]``. In recurrent mode, the next states
    are right after the last step of each piece; other frames keep what was recorded there, or NaN where there was
    nothing.

    Args:
        input_size: ``F``.
        hidden_size: ``H``.
        num_layers: layers on top of one another.
        bias: whether there are biases.
        batch_first: True.
        dropout: probability, between layers.
        proj_size: size of a linear projection of ``h``; 0 for none.
        bidirectional: False.
        python_based: write the layer out in torch operations, :class:`~rollwright.modules.LSTM`.
        in_key: the input; the states are then ``"recurrent_state_h"`` and ``"recurrent_state_c"``.
        in_keys: input, two states and, if it is not ``"is_init"``, the mark of first steps.
        out_key: the output; the next states are then those of ``in_key``, below ``"next"``.
        out_keys: output and two next states.
        device: of the weights.
        lstm: a ready layer, instead of sizes.
        default_recurrent_mode: where no mode is set.
        recurrent_backend, recurrent_compute_dtype, recurrent_recompute, recurrent_matmul_precision: accepted for
            programs of the field; they change nothing here. Pieces run without padding, by torch's own layer.

    Raises:
        ValueError: keys are too few, too many or given twice; the layer is bidirectional or not batch first.
        TypeError: sizes are missing, or ``lstm`` is no LSTM.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> lstm = LSTMModule(4, 8, in_key="observation", out_key="features")
        >>> env = GymEnv("CartPole-v1", policy=lstm)
        >>> lstm(env.reset())["features"].shape
        torch.Size([8])
    """

    _states = ("recurrent_state_h", "recurrent_state_c")
    _attribute = "lstm"

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        proj_size: int = 0,
        bidirectional: bool = False,
        python_based: bool = False,
        *,
        in_key: NestedKey | None = None,
        in_keys: list[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: list[NestedKey] | None = None,
        device: torch.device | str | int | None = None,
        lstm: nn.LSTM | None = None,
        default_recurrent_mode: Mode = None,
        recurrent_backend: str = "auto",
        recurrent_compute_dtype: torch.dtype = torch.float32,
        recurrent_recompute: str = "none",
        recurrent_matmul_precision: str = "auto",
    ) -> None:
        _check_backend(recurrent_backend, recurrent_recompute)
        sizes = {"input_size": input_size, "hidden_size": hidden_size}
        if lstm is None:
            _check_sizes("lstm", sizes)
            _check_layout(batch_first, bidirectional)
            kind = LSTM if python_based else nn.LSTM
            rnn: nn.RNNBase = kind(
                input_size,
                hidden_size,
                num_layers,
                bias,
                batch_first=True,
                dropout=dropout,
                proj_size=proj_size,
                device=device,
            )
        else:
            settings = {**sizes, "python_based": python_based, "proj_size": proj_size, "device": device}
            rnn = _ready("lstm", lstm, nn.LSTM, settings)
        super().__init__(rnn, (in_key, in_keys, out_key, out_keys), default_recurrent_mode)

    def make_python_based(self) -> Self:
        """Exchange the layer for :class:`~rollwright.modules.LSTM`, with the same weights, in place."""
        self.exchange(LSTM)
        return self

    def make_cudnn_based(self) -> Self:
        """Exchange the layer for ``torch.nn.LSTM``, with the same weights, in place."""
        self.exchange(nn.LSTM)
        return self
