"""The steps that a flat policy is a list of: each reads some slots of a list of values and fills others."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

from rollwright._keys import NestedKey, unravel
from rollwright.policies.base import NotFlat
from rollwright.policies.layers import Layer, reuse_memory

__all__ = ["Ask", "Call", "Chain", "Copy", "Node", "Outputs", "Own", "Step", "Values", "as_tensor"]

Values = list[Any]  # one tensor (or None) per slot
Step = Callable[[Values], None]


@dataclass(frozen=True)
class Node(abc.ABC):
    """One step: what it reads, what it writes, and how.

    Attributes:
        reads: slots of the arguments.
        writes: slots of the results.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @abc.abstractmethod
    def step(self) -> Step:
        """The function that does it."""

    @property
    def calls(self) -> int:
        """How many calls it makes, for the description."""
        return 1

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return type(self).__name__

    @property
    def known(self) -> bool:
        """Whether equal shapes and dtypes in give equal ones out."""
        return True


@dataclass(frozen=True)
class Chain(Node):
    """Layers one after another, from one slot.

    Attributes:
        layers: the calls.
        outputs: turns the result into one tensor per slot, where the last layer is not known to give them.
    """

    layers: tuple[Layer, ...]
    outputs: Outputs

    def step(self) -> Step:
        """One layer after another."""
        (source,), functions = self.reads, tuple(layer.call for layer in reuse_memory(list(self.layers)))
        writes, outputs = self.writes, self.outputs
        known = self.layers[-1].outputs if self.layers else 1
        if known == 1 == len(writes):
            return _one(source, functions, writes[0])
        if known == 2 == len(writes):
            return _two(source, functions, *writes)

        def run(values: Values) -> None:
            x = values[source]
            for function in functions:
                x = function(x)
            for slot, value in zip(writes, outputs(x), strict=True):
                values[slot] = value

        return run

    @property
    def calls(self) -> int:
        """One per layer."""
        return len(self.layers)

    @property
    def known(self) -> bool:
        """Whether every layer is."""
        return all(layer.outputs is not None for layer in self.layers)


def _one(source: int, functions: Sequence[Callable[[Any], Any]], target: int) -> Step:
    def run(values: Values) -> None:
        x = values[source]
        for function in functions:
            x = function(x)
        values[target] = x

    return run


def _two(source: int, functions: Sequence[Callable[[Any], Any]], first: int, second: int) -> Step:
    def run(values: Values) -> None:
        x = values[source]
        for function in functions:
            x = function(x)
        values[first], values[second] = x

    return run


@dataclass(frozen=True)
class Call(Node):
    """A module or function that is called as it is.

    Attributes:
        function: takes the values read, or keyword arguments where ``names`` are given.
        names: of the arguments; empty for positional ones.
        constants: further keyword arguments.
        outputs: turns the result into one tensor per slot.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    outputs: Outputs

    @property
    def known(self) -> bool:
        """Not known."""
        return False

    @property
    def label(self) -> str:
        """The module that owns the function."""
        return self.outputs.owner

    def step(self) -> Step:
        """Collect the arguments, call, spread the results."""
        function, reads, writes = self.function, self.reads, self.writes
        names, constants, outputs = self.names, self.constants, self.outputs

        def run(values: Values) -> None:
            arguments = [values[slot] for slot in reads]
            if names:
                result = function(**{**dict(zip(names, arguments, strict=True)), **constants})
            else:
                result = function(*arguments, **constants)
            for slot, value in zip(writes, outputs(result), strict=True):
                values[slot] = value

        return run


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
            NotFlat: an output is no tensor and cannot be made one.
        """
        if result is None:
            result = ()
        elif isinstance(result, dict) or is_tensor_collection(result):
            result = self._by_key(result)
        elif not isinstance(result, tuple):
            result = (result,)
        if len(result) != len(self.keys):
            raise RuntimeError(
                f"{self.owner} returned {len(result)} outputs for {len(self.keys)} out_keys, {list(self.keys)}. "
                "Name each output once."
            )
        return [value if type(value) is Tensor else as_tensor(value, self.batch, self.owner) for value in result]

    def _by_key(self, result: Any) -> tuple[Any, ...]:
        named = {unravel(key): value for key, value in result.items()} if isinstance(result, dict) else result
        if not all(key in named for key in self.keys):
            return (result,)
        return tuple(named.get(key) for key in self.keys)


def as_tensor(value: Any, batch: tuple[int, ...], owner: str) -> Tensor:
    """A tensor from what a TensorDict makes one of: numbers, lists of them, arrays.

    Raises:
        NotFlat: from anything else.
    """
    if not isinstance(value, Tensor):
        value = TensorDict(batch_size=batch).set("value", TensorDict.from_any(value)).get("value")
    if not isinstance(value, Tensor):
        raise NotFlat(f"{owner} returned a {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Copy(Node):
    """One value under a second name."""

    def step(self) -> Step:
        """Share the tensor."""
        (source,), (target,) = self.reads, self.writes

        def run(values: Values) -> None:
            values[target] = values[source]

        return run


@dataclass(frozen=True)
class Own(Node):
    """Memory of its own for a value that may share another's."""

    def step(self) -> Step:
        """Copy the tensor."""
        (source,) = self.reads

        def run(values: Values) -> None:
            values[source] = values[source].detach().clone()

        return run

    @property
    def calls(self) -> int:
        """None of the policy's."""
        return 0


@dataclass(frozen=True)
class Ask(Node):
    """A TensorDict module that is asked itself, on a TensorDict of what it reads and no more.

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

    @property
    def known(self) -> bool:
        """Not known."""
        return False

    @property
    def label(self) -> str:
        """The distribution."""
        kind = getattr(self.module, "distribution_class", None)
        return f"the distribution {getattr(kind, '__name__', kind)}"

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
