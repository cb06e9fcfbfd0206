"""Nodes of a policy on arrays: each reads some slots of a list of values and fills others."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

from rollwright._keys import NestedKey, unravel
from rollwright.errors import NotNative
from rollwright.policies.draws.noise import Noise
from rollwright.policies.emitter import Array, Emitter

Values = list[Any]  # one tensor (or None) per slot
Step = Callable[[Values], None]


@dataclass(frozen=True)
class Node(abc.ABC):
    """One step: what it reads, what it writes, and how.

    Attributes:
        reads: slots of the arguments.
        writes: slots of the results.
        known: whether equal shapes and dtypes in give equal ones out.
        compiles: whether ``torch.compile`` may take it together with other steps.
        in_torch: whether a NumPy program runs it on tensors.
        draws: whether it draws random numbers when it is run there.
        transient: whether no tensor that it makes outlives the step, so that it may run in torch's inference mode.
        why: the reason why a module is called whole; empty: none is.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]

    known: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    in_torch: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    transient: ClassVar[bool] = False
    why: ClassVar[str] = ""

    @abc.abstractmethod
    def step(self) -> Step:
        """The function that does it on tensors."""

    def checked_step(self) -> Step:
        """The same, compared with what it stands for; runs once, at the first call."""
        return self.step()

    def settled(self) -> Node:
        """What runs from the second call on, once ``checked_step()`` has run."""
        return self

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Append the calls that do it in NumPy; the results.

        Raises:
            NotNative: it is not known there.
        """
        raise NotNative(f"{self.label} is not known in NumPy")

    @property
    def calls(self) -> int:
        """How many calls of the policy's it makes, for the description."""
        return 1

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return type(self).__name__


@dataclass(frozen=True)
class Outputs:
    """Turns what a policy's part returned into tensors, as ``TensorDictModule`` does.

    Attributes:
        keys: where the outputs go.
        batch: the batch size of the entries.
        owner: named in messages.
    """

    keys: tuple[NestedKey, ...]
    batch: tuple[int, ...]
    owner: str

    def __call__(self, result: Any) -> Sequence[Tensor]:
        """One tensor per key.

        Raises:
            RuntimeError: the number of outputs is not that of the keys.
            NotNative: an output is no tensor and cannot be made one.
        """
        if type(result) is not tuple:  # cheaper than what tests for other classes
            result = self._as_tuple(result)
        if len(result) != len(self.keys):
            raise RuntimeError(
                f"{self.owner} returned {len(result)} outputs for {len(self.keys)} out_keys, {list(self.keys)}. "
                "Name each output once."
            )
        return [value if type(value) is Tensor else as_tensor(value, self.batch, self.owner) for value in result]

    def _as_tuple(self, result: Any) -> tuple[Any, ...]:
        if type(result) is Tensor:
            return (result,)
        if result is None:
            return ()
        if isinstance(result, dict) or is_tensor_collection(result):
            return self._by_key(result)
        return result if isinstance(result, tuple) else (result,)

    def _by_key(self, result: Any) -> tuple[Any, ...]:
        named = {unravel(key): value for key, value in result.items()} if isinstance(result, dict) else result
        if not all(key in named for key in self.keys):
            return (result,)
        return tuple(named.get(key) for key in self.keys)


def as_tensor(value: Any, batch: tuple[int, ...], owner: str) -> Tensor:
    """A tensor from what a TensorDict makes one of: numbers, lists of them, arrays.

    Raises:
        NotNative: from anything else.
    """
    if not isinstance(value, Tensor):
        value = TensorDict(batch_size=batch).set("value", TensorDict.from_any(value)).get("value")
    if not isinstance(value, Tensor):
        raise NotNative(f"{owner} returned a {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Own(Node):
    """Memory of its own for a value that may share another's."""

    transient: ClassVar[bool] = True

    def step(self) -> Step:
        """Copy the tensor."""
        (source,) = self.reads

        def run(values: Values) -> None:
            values[source] = values[source].detach().clone()

        return run

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Results of a NumPy program are copied at its end."""
        return reads

    @property
    def calls(self) -> int:
        """None of the policy's."""
        return 0


class Draw(Node):
    """A value of a distribution, and perhaps its log-prob, without building the distribution.

    Attributes:
        fresh: whether the value has memory of its own.
        nan_shows: what turns NaN where the parameters of the distribution do, if there is no log-prob: the first
            parameter, or the value; None: each step tests the parameters.
    """

    fresh: ClassVar[bool] = True
    transient: ClassVar[bool] = True
    nan_shows: ClassVar[Literal["parameter", "value"] | None] = "value"

    def noise(self, reads: Sequence[Tensor]) -> Noise | None:
        """The noise of one step, where it can be drawn before; None where there is none, or it cannot.

        Args:
            reads: parameters like those to come.
        """
        return None

    def step_with(self, noise: int) -> Step:
        """As :meth:`step`, with the noise in a slot."""
        raise TypeError(f"{type(self).__name__} draws its noise in its step: noise() is None")


@dataclass(frozen=True)
class Ask(Node):
    """A TensorDict module that builds its distribution: it is called on a TensorDict of what it reads and no more.

    Attributes:
        module: the TensorDict module.
        in_keys: what it reads, in the order of ``reads``.
        out_keys: what it writes, in the order of ``writes``.
        batch: the batch size of the entries.
    """

    module: Callable[[TensorDict], Any]
    in_keys: tuple[NestedKey, ...]
    out_keys: tuple[NestedKey, ...]
    batch: tuple[int, ...]

    known: ClassVar[bool] = False
    compiles: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The distribution."""
        kind = getattr(self.module, "distribution_class", None)
        return f"the distribution {getattr(kind, '__name__', kind)}"

    @property
    def calls(self) -> int:
        """None: it is named beside the calls."""
        return 0

    def step(self) -> Step:
        """Build a TensorDict, call, read it."""
        module, batch, in_keys, out_keys = self.module, torch.Size(self.batch), self.in_keys, self.out_keys
        reads, writes = self.reads, self.writes

        def run(values: Values) -> None:
            entries = {key: values[slot] for key, slot in zip(in_keys, reads, strict=True)}
            td = module(TensorDict(entries, batch_size=batch))
            for key, slot in zip(out_keys, writes, strict=True):
                values[slot] = td.get(key)

        return run


def same_generators(like: Tensor) -> Any:
    """Put torch's generators back as they were."""
    return torch.random.fork_rng(devices=[like.device] if like.is_cuda else [])


def generator_state(like: Tensor) -> Tensor:
    """The state of the generator of a tensor's device."""
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


def same_bits(one: Any, other: Any) -> bool:
    """Whether two tensors are equal, NaN for NaN."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    form = torch.contiguous_format
    return torch.equal(*(each.clone(memory_format=form).reshape(-1).view(torch.uint8) for each in (one, other)))
