"""RecurrentModule: a recurrent layer that reads and writes TensorDicts, of any kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.layout import IS_INIT
from rollwright.data.specs import Unbounded
from rollwright.errors import PolicyKeyError
from rollwright.modules.primers import make_primer
from rollwright.modules.recurrent.cells import States
from rollwright.modules.recurrent.kernels import run_pieces, take_step
from rollwright.modules.recurrent.mode import Mode, as_flag, recurrent_mode
from rollwright.modules.recurrent.pieces import Pieces

if TYPE_CHECKING:
    from rollwright.envs.transforms import TensorDictPrimer

Keys = NestedKey | list[NestedKey] | None


class RecurrentModule(TensorDictModuleBase):
    """Base class of LSTMModule and GRUModule: reads and writes frames and states.

    Args:
        rnn: the layer.
        keys: ``in_key``, ``in_keys``, ``out_key`` and ``out_keys`` as the user gave them.
        default_mode: where :class:`~rollwright.modules.set_recurrent_mode` sets nothing.

    Attributes:
        init_key: the mark of first steps, the last of ``in_keys``.
        state_keys: where states are read.
    """

    _states: ClassVar[tuple[str, ...]]  # default names of the states
    _attribute: ClassVar[str]  # where the layer is kept

    def __init__(self, rnn: nn.RNNBase, keys: tuple[Keys, Keys, Keys, Keys], default_mode: Mode) -> None:
        super().__init__()
        setattr(self, self._attribute, rnn)
        in_key, in_keys, out_key, out_keys = keys
        inputs = _several("in_key", in_key, in_keys, list(self._states))
        outputs = _several("out_key", out_key, out_keys, [("next", name) for name in self._states])
        count = 1 + len(self._states)
        if len(inputs) == count:
            inputs.append(IS_INIT)
        if len(inputs) != count + 1:
            raise ValueError(
                f"in_keys: {type(self).__name__} expected an input, {count - 1} state(s) and, if it is not 'is_init', "
                f"the mark of first steps, got {inputs}."
            )
        if len(outputs) != count:
            raise ValueError(
                f"out_keys: {type(self).__name__} expected an output and {count - 1} state(s), got {outputs}. "
                "Name the states ('next', <their in_key>)."
            )
        self.in_keys, self.out_keys = cast(Any, inputs), cast(Any, outputs)
        self._default_mode = as_flag("default_recurrent_mode", default_mode)

    @property
    def _rnn(self) -> nn.RNNBase:
        return cast(nn.RNNBase, getattr(self, self._attribute))

    def exchange(self, kind: type[nn.RNNBase]) -> None:
        """Put a layer of another class in the place of the layer, with the same parameters, in place."""
        layer = self._rnn
        if type(layer) is kind:
            return
        sizes = {"input_size": layer.input_size, "hidden_size": layer.hidden_size, "num_layers": layer.num_layers}
        options = {"bias": layer.bias, "batch_first": layer.batch_first, "dropout": layer.dropout, "device": "meta"}
        if layer.proj_size:
            options["proj_size"] = layer.proj_size
        made = cast(Any, kind)(**sizes, **options)
        for name, parameter in layer.named_parameters():
            setattr(made, name, parameter)
        setattr(self, self._attribute, made.train(layer.training))

    @property
    def init_key(self) -> NestedKey:
        """Key of the mark of first steps."""
        return cast(NestedKey, self.in_keys[-1])

    @property
    def state_keys(self) -> list[NestedKey]:
        """Keys of the states that are read."""
        return cast("list[NestedKey]", self.in_keys[1:-1])

    @property
    def recurrent_mode(self) -> bool:
        """Whether the last batch dimension is time (set with :class:`~rollwright.modules.set_recurrent_mode`)."""
        mode = recurrent_mode()
        return bool(self._default_mode) if mode is None else mode

    def _state_shapes(self) -> list[tuple[int, int]]:
        rnn = self._rnn
        sizes = (rnn.proj_size or rnn.hidden_size, rnn.hidden_size)
        return [(rnn.num_layers, size) for size in sizes[: len(self._states)]]

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """The transform that gives an environment this module's states, zeros at each reset.

        Raises:
            ValueError: a state is written elsewhere than at ``("next", <key where it is read>)``.
        """
        for read, written in zip(self.state_keys, self.out_keys[1:], strict=True):
            if as_tuple(cast(NestedKey, written)) != ("next", *as_tuple(read)):
                raise ValueError(
                    f"out_keys: expected the state read at {read!r} to be written at {('next', *as_tuple(read))!r}, "
                    f"got {written!r}. An environment carries states from 'next' to the next step's root."
                )
        dtype = next(self._rnn.parameters()).dtype
        shapes = zip(self.state_keys, self._state_shapes(), strict=True)
        return make_primer({key: Unbounded(shape, dtype=dtype) for key, shape in shapes})

    # Running ----------------------------------------------------------------------------------

    @dispatch  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        """Write outputs and next states into ``tensordict``, and return it.

        Called with the entries by name, in place of a TensorDict, it returns a tuple of what ``out_keys`` name.

        Raises:
            PolicyKeyError: a state is missing; or, in recurrent mode, the mark of first steps.
            ValueError: an entry's shape does not fit; in recurrent mode, there is no time dimension.
        """
        return self._run_batch(tensordict) if self.recurrent_mode else self._take_step(tensordict)

    def _take_step(self, td: TensorDictBase) -> TensorDictBase:
        batch = td.batch_size
        x, states = self._read(td)
        y, successors = take_step(self._rnn, x, states)
        td.set(self.out_keys[0], y.reshape(*batch, y.shape[-1]))
        for key, state in zip(self.out_keys[1:], successors, strict=True):
            td.set(key, state.reshape(*batch, *state.shape[1:]))
        return td

    def _run_batch(self, td: TensorDictBase) -> TensorDictBase:
        batch = td.batch_size
        if not batch or not batch.numel():
            raise ValueError(
                f"tensordict: {type(self).__name__} in recurrent mode expected a batch of frames whose last dimension "
                f"is time, got batch size {list(batch)}. Leave set_recurrent_mode out to take single steps."
            )
        x, states = self._read(td)
        pieces = Pieces(self._first_steps(td))
        y, finals = run_pieces(self._rnn, x, tuple(state.index_select(0, pieces.starts) for state in states), pieces)
        td.set(self.out_keys[0], y.reshape(*batch, y.shape[-1]))
        for i, key in enumerate(self.out_keys[1:]):
            if self._output_is_state and self._rnn.num_layers == 1:
                state = y.unsqueeze(1).clone()  # a later layer may change y in place
            else:
                state = _known_at(pieces.last, finals[i], td.get(cast(NestedKey, key), None), pieces.num_frames)
            td.set(key, state.reshape(*batch, *state.shape[1:]))
        return td

    _output_is_state: ClassVar[bool] = False

    def _read(self, td: TensorDictBase) -> tuple[Tensor, States]:
        """The input ``[N, F]`` and the states, each ``[N, layers, size]``."""
        batch = td.batch_size
        value = td.get(cast(NestedKey, self.in_keys[0]), None)
        if value is None:
            raise PolicyKeyError(
                f"tensordict: {type(self).__name__} reads {self.in_keys[0]!r}, and there are "
                f"{key_str(td.keys(True, True))}. Change in_keys."
            )
        width = self._rnn.input_size
        if value.shape != (*batch, width):
            raise ValueError(
                f"{self.in_keys[0]!r}: {type(self).__name__} expected shape {[*batch, width]} (batch size, input_size),"
                f" got {list(value.shape)}. Flatten the entry, or change input_size."
            )
        shapes = zip(self.state_keys, self._state_shapes(), strict=True)
        return value.reshape(-1, width), tuple(self._state(td, key, shape) for key, shape in shapes)

    def _state(self, td: TensorDictBase, key: NestedKey, shape: tuple[int, int]) -> Tensor:
        state = td.get(key, None)
        if state is None:
            raise PolicyKeyError(
                f"tensordict: {type(self).__name__} reads its state at {key!r}, which is not there. Let the environment"
                " provide it: pass policy= to its constructor, or append module.make_tensordict_primer()."
            )
        if state.shape != (*td.batch_size, *shape):
            raise ValueError(
                f"{key!r}: {type(self).__name__} expected shape {[*td.batch_size, *shape]} (batch size, layers, size), "
                f"got {list(state.shape)}. Prime the environment with module.make_tensordict_primer()."
            )
        return cast(Tensor, state.reshape(-1, *shape))

    def _first_steps(self, td: TensorDictBase) -> Tensor:
        """Marks of first steps, bool ``[*B, T]``."""
        mark = td.get(self.init_key, None)
        if mark is None:
            raise PolicyKeyError(
                f"tensordict: {type(self).__name__} in recurrent mode reads {self.init_key!r}, the mark of first steps,"
                " which is not there. Append InitTracker() to the environment, or pass policy= to its constructor."
            )
        if mark.numel() != td.batch_size.numel():
            raise ValueError(
                f"{self.init_key!r}: expected one mark for each frame, shape {[*td.batch_size, 1]}, got "
                f"{list(mark.shape)}. Give the module the mark of its own group."
            )
        return cast(Tensor, mark.reshape(td.batch_size).bool())


def _known_at(last: Tensor, finals: Tensor, recorded: Tensor | None, num_frames: int) -> Tensor:
    """States ``[N, layers, size]``: ``finals`` at the frames ``last``, elsewhere what was recorded, or NaN."""
    if len(last) == num_frames:
        return finals
    shape = (num_frames, *finals.shape[1:])
    if recorded is None:
        return finals.new_full(shape, torch.nan).index_copy_(0, last, finals)
    return recorded.detach().reshape(shape).to(finals.dtype).index_copy(0, last, finals)


def _several(name: str, key: Keys, keys: Keys, states: Sequence[NestedKey]) -> list[NestedKey]:
    """``keys``, or ``key`` and the default names of states."""
    if (key is None) == (keys is None):
        raise ValueError(
            f"{name}: expected either {name}= or {name}s=, got {'neither' if key is None else 'both'}. {name}= names "
            f"the first, and leaves the states at {key_str(cast(Any, states))}."
        )
    return [unravel(cast(NestedKey, key)), *states] if key is not None else as_keys(keys)
