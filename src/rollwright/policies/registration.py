"""Layers and distributions of the user's own, registered to run on arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import Tensor, nn
from torch.distributions import constraints

from rollwright._keys import unravel
from rollwright.errors import NotNative, PolicyError
from rollwright.policies.distributions import DISTRIBUTIONS, EXPLORATION_TYPES, Sampling
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.layers import LAYERS, KnownLayer
from rollwright.policies.nodes import Ask, Draw, Step, Values, generator_state, same_bits, same_generators


def register_layer(
    kind: type[nn.Module],
    function: Callable[[Any, Tensor], Tensor] | None = None,
    *,
    in_numpy: Callable[..., np.ndarray] | None = None,
) -> None:
    """Let modules of a type run as layers: a call of a function on one tensor, without the machinery of ``nn.Module``.

    A layer is run this way where it is the module of a ``TensorDictModule``, or in an ``nn.Sequential`` there, and has
    no hooks. Subclasses of ``kind`` are not meant. When a policy takes its first step, the function's result is
    compared with the module's, bit for bit, and the one in NumPy with that, to rounding.

    Registrations are those of the process: register where ``kind`` is defined, or in ``init_fn`` of workers.

    Args:
        kind: takes one tensor and returns one.
        function: ``(module, input) -> output``; None: ``kind.forward``. It reads the parameters of the module at each
            call, and the output shares memory with nothing but the input.
        in_numpy: ``(module, input, **tensors) -> output``, the same in NumPy, for ``compile_policy=True``. ``tensors``
            are the parameters and buffers of the module by name, as arrays, as they were when the rollout began; of
            the module, only settings are to be read. None: such a policy is compiled by torch.

    Raises:
        TypeError: ``kind`` is no subclass of ``nn.Module``, or one of the functions cannot be called.
        ValueError: ``kind`` is registered already.

    Example:
        >>> class Scaled(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(torch.ones(()))
        ...     def forward(self, x):
        ...         return torch.tanh(x) * self.scale
        >>> register_layer(Scaled, in_numpy=lambda module, x, *, scale: np.tanh(x) * scale)
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"kind: expected a subclass of torch.nn.Module, got {kind!r}. Pass the class.")
    if kind.__module__.startswith("torch.nn.modules."):
        raise ValueError(f"kind: {kind.__name__} is registered already, as all of torch's layers are.")
    _check_new(kind, LAYERS)
    _check_functions({"function": function, "in_numpy": in_numpy})
    call: Callable[[Any, Tensor], Tensor] = kind.forward if function is None else function
    LAYERS[kind] = KnownLayer(call, None if in_numpy is None else partial(_emit, in_numpy))


def register_distribution(
    kind: Callable[..., Any],
    parameters: Sequence[str],
    *,
    sample: Callable[..., Tensor] | None = None,
    mode: Callable[..., Tensor] | None = None,
    mean: Callable[..., Tensor] | None = None,
    deterministic: Callable[..., Tensor] | None = None,
    log_prob: Callable[..., Tensor] | None = None,
) -> None:
    """Let a distribution be sampled and scored by functions on tensors, without building an object.

    A ``ProbabilisticTensorDictModule`` of exactly this ``distribution_class`` uses them where it passes exactly these
    parameters, and there is a function for what it does; elsewhere it builds the distribution. So it does at a step
    whose parameters do not satisfy ``kind.arg_constraints``, and raises what that raises. When a policy takes its
    first step, values, log-probs and the random numbers drawn are compared with those of the distribution, bit for
    bit.

    Registrations are those of the process: register where ``kind`` is defined, or in ``init_fn`` of workers.

    Args:
        kind: the ``distribution_class``.
        parameters: names of its parameters, in the order in which the functions take them.
        sample: ``(*parameters) -> value``, drawn from torch's global generator; for ``ExplorationType.RANDOM``.
        mode: same, for ``ExplorationType.MODE``.
        mean: same, for ``ExplorationType.MEAN``.
        deterministic: same, for ``ExplorationType.DETERMINISTIC``.
        log_prob: ``(value, *parameters) -> log-prob``, for ``return_log_prob=True``.

    Raises:
        TypeError: ``kind`` or one of the functions cannot be called, or ``parameters`` are no names.
        ValueError: ``kind`` is registered already, or there is no function for any exploration type.

    Example:
        >>> class Shifted(torch.distributions.Exponential):
        ...     def rsample(self, sample_shape=()):
        ...         return super().rsample(sample_shape) + 1
        >>> register_distribution(
        ...     Shifted, ["rate"], sample=lambda rate: torch.empty_like(rate).exponential_() / rate + 1
        ... )
    """
    if not callable(kind):
        raise TypeError(f"kind: expected a distribution class, got {type(kind).__name__}: {kind!r}.")
    _check_new(kind, DISTRIBUTIONS)
    if isinstance(parameters, str) or not all(isinstance(name, str) for name in parameters) or not parameters:
        raise TypeError(f"parameters: expected names such as ['loc', 'scale'], got {parameters!r}.")
    functions = {"sample": sample, "mode": mode, "mean": mean, "deterministic": deterministic}
    _check_functions({**functions, "log_prob": log_prob})
    if not any(functions.values()):
        raise ValueError("sample: expected a function for one exploration type at least, got none. Pass sample=.")
    by_type = dict(zip(EXPLORATION_TYPES, functions.values(), strict=True))
    DISTRIBUTIONS[kind] = partial(_draw, tuple(parameters), by_type, log_prob)


def _check_new(kind: Any, table: Mapping[Any, Any]) -> None:
    if kind in table:
        raise ValueError(f"kind: {kind.__name__} is registered already. Register each type once.")


def _check_functions(functions: Mapping[str, Any]) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name}: expected a function or None, got {type(function).__name__}: {function!r}.")


# Layers -------------------------------------------------------------------------------------------


def _emit(function: Callable[..., np.ndarray], emitter: Emitter, module: nn.Module, x: Array) -> Array:
    name = type(module).__name__
    tensors: dict[str, Any] = {}
    if any("." in key for key, _ in (*module.named_parameters(), *module.named_buffers())):
        raise NotNative(f"{name} has parameters in parts of its own")
    for owner in (module._parameters, module._buffers):
        tensors.update(
            {key: emitter.parameter(owner, key, x.dtype) for key, value in owner.items() if value is not None}
        )
    with np.errstate(all="ignore"):
        example = np.asarray(function(module, np.zeros_like(x), **tensors))
    out, copy = emitter.new(example.shape, example.dtype), np.copyto
    emitter.calls.append(lambda: copy(out, function(module, x, **tensors)))
    return out


# Distributions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RegisteredDraw(Draw):
    """A value of a registered distribution, and perhaps its log-prob.

    Attributes:
        plain: builds the distribution.
        tests: whether parameters satisfy their constraints, by slot.
        pick: gives a value.
        score: gives its log-prob.
    """

    plain: Ask
    tests: tuple[tuple[int, Callable[[Tensor], Tensor]], ...]
    pick: Callable[..., Tensor]
    score: Callable[..., Tensor]

    compiles = False
    fresh = False
    transient = False
    nan_shows = None

    @property
    def label(self) -> str:
        """The distribution."""
        return self.plain.label

    def step(self) -> Step:
        """The function that does it on tensors."""
        reads, action, scored = self.reads, self.writes[0], self.writes[1:]
        pick, score, tests = self.pick, self.score, self.tests
        plain = replace(self.plain, writes=self.writes).step()

        def run(values: Values) -> None:
            for slot, test in tests:
                if not test(values[slot]).all():
                    plain(values)
                    return
            given = [values[slot] for slot in reads]
            values[action] = value = pick(*given)
            for slot in scored:
                values[slot] = score(value, *given)

        return run

    def checked_step(self) -> Step:
        """The same, compared with what it stands for; runs once, at the first call."""
        fast, plain = self.step(), replace(self.plain, writes=self.writes).step()

        def run(values: Values) -> None:
            expected, like = values.copy(), values[self.reads[0]]
            with same_generators(like):
                plain(expected)
                after = generator_state(like)
            fast(values)
            same = all(same_bits(values[slot], expected[slot]) for slot in self.writes)
            if not same or not torch.equal(generator_state(like), after):
                raise PolicyError(
                    f"policy: the functions that register_distribution was given for {self.label} give other "
                    "values or log-probs than it does, or draw other random numbers. Compute what it computes, in the "
                    "same order."
                )

        return run


def _draw(
    parameters: tuple[str, ...],
    by_type: Mapping[InteractionType, Callable[..., Tensor] | None],
    score: Callable[..., Tensor] | None,
    given: Sampling,
) -> Draw | None:
    module, slots = given.module, dict(zip(given.names, given.reads, strict=True))
    pick, scored = by_type[given.exploration_type], bool(module.return_log_prob)
    if pick is None or (scored and score is None) or slots.keys() != set(parameters):
        return None
    out_keys = [*module.dist_sample_keys, *([module.log_prob_key] if scored else [])]
    in_keys, writes = (tuple(map(unravel, keys)) for keys in (cast(Any, module.in_keys), out_keys))
    limits = getattr(module.distribution_class, "arg_constraints", None)
    tests = [
        (slots[name], limit.check)
        for name, limit in (limits if isinstance(limits, dict) else {}).items()
        if name in slots and not constraints.is_dependent(limit)
    ]
    return _RegisteredDraw(
        reads=tuple(slots[name] for name in parameters),
        writes=(),
        plain=Ask(given.reads, (), module, in_keys, writes, given.batch),
        tests=tuple(tests),
        pick=pick,
        score=cast(Any, score),
    )
