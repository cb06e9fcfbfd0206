"""Emitter: builds the NumPy calls on fixed memory of a NumPy program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from rollwright.errors import NotNative
from rollwright.policies.draws.noise import Kind, Noise

Array = np.ndarray
_FEW = 4  # outcomes up to which a pairwise logaddexp beats exp, sum and log


class Emitter:
    """Collects calls that are bound to their memory: running the program is running ``calls``, one after another.

    Attributes:
        calls: take no arguments, and write into memory that stays the same.
        noises: what the distributions draw, in order.
        noise: gives the next row of these random numbers.
        draws_in_torch: whether a step on tensors draws random numbers when it is run.
        refreshes: calls that copy parameters to where the other calls read them; to be run before a rollout.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.noises: list[Noise] = []
        self.noise: Iterator[Array] = iter(())
        self.refreshes: list[Callable[[], Any]] = []
        self.draws_in_torch = False
        self._own: list[Array] = []
        self._of_parameters: dict[tuple[int, str], Array] = {}
        self._fixed: dict[int, Array] = {}  # held, so that no other array gets the id of one
        self._with_one: dict[int, tuple[Array, Array]] = {}

    def new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for one value; behind that of a vector stands a one, see :meth:`with_one`."""
        if len(shape) != 1:
            return np.empty(shape, dtype)
        longer = np.ones(shape[0] + 1, dtype)
        vector = longer[:-1]
        self._with_one[id(vector)] = vector, longer  # the vector too, so that no other gets its id
        return vector

    def with_one(self, vector: Array) -> Array:
        """A vector and a one behind it, by which a weight matrix with its bias as a last column is to be multiplied."""
        if id(vector) in self._with_one:
            return self._with_one[id(vector)][1]
        copied = self.new(vector.shape, vector.dtype)
        self.put(np.copyto, copied, vector)
        return self._with_one[id(copied)][1]

    def put(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Append a call."""
        if isinstance(function, np.ufunc):  # which take an array of no dimensions faster than a number
            dtype = next(value.dtype for value in arguments if isinstance(value, np.ndarray))
            arguments = tuple(np.asarray(v, dtype) if isinstance(v, int | float) else v for v in arguments)
        self.calls.append(partial(function, *arguments, **options))

    def to(self, function: Callable[..., Any], *arguments: Any, like: Array) -> Array:
        """Append a call that writes into new memory of the shape of ``like``, which is returned."""
        out = self.new(like.shape, like.dtype)
        self.put(function, *arguments, out=out)
        return out

    def parameter(self, owner: Mapping[str, Any], name: str, dtype: Any = None) -> Array | None:
        """Memory that holds a parameter or buffer as it is when a rollout begins; None if there is none.

        Args:
            owner: the dictionary in which its module keeps it.
            name: its name there.
            dtype: of the data, which it must have; None: any.

        Raises:
            NotNative: it is of another dtype than the data, or of one that NumPy has not.
        """
        if (id(owner), name) in self._of_parameters:
            return self._of_parameters[id(owner), name]
        tensor = owner.get(name)
        if tensor is None:
            return None
        try:
            found = tensor.detach().numpy().dtype
        except TypeError:  # on another device, or bfloat16
            found = None
        if found is None or (dtype is not None and found != dtype):
            raise NotNative(f"a parameter is {tensor.dtype} and the data are {dtype}")
        own = np.empty(tuple(tensor.shape), found)
        self.refreshes.append(lambda: np.copyto(own, cast(torch.Tensor, owner[name]).detach().numpy()))
        self._own.append(own)
        self._of_parameters[id(owner), name] = own
        self.fix([own])
        return own

    def fix(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Note that the arrays change between rollouts alone."""
        self._fixed.update({id(array): array for array in arrays})
        return arrays

    def is_fixed(self, array: Array) -> bool:
        """Whether an array changes between rollouts alone."""
        return id(array) in self._fixed

    @contextmanager
    def once(self) -> Iterator[None]:
        """Have the calls that are appended run before a rollout, not at each step."""
        calls, self.calls = self.calls, self.refreshes
        try:
            yield
        finally:
            self.calls = calls

    def draw(self, kind: Kind, like: Array) -> None:
        """Have ``noise`` give a row of such random numbers at this place, once a step."""
        dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
        self.noises.append(Noise(kind, like.shape, dtype, torch.device("cpu")))

    def step_in_torch(
        self, step: Callable[[list[Any]], None], reads: Sequence[Array], examples: Sequence[torch.Tensor], draws: bool
    ) -> list[Array]:
        """Append a step on tensors that share memory with the arrays; its results.

        Args:
            step: reads the first values of a list, and writes those after them.
            reads: what it reads.
            examples: of its results, for shapes and dtypes.
            draws: whether it draws random numbers.
        """
        self.draws_in_torch |= draws
        results = [self.new(tuple(example.shape), example.numpy().dtype) for example in examples]
        inputs, targets = ([torch.from_numpy(array) for array in arrays] for arrays in (reads, results))
        blank: list[Any] = [None] * len(targets)

        def run() -> None:
            values = [*inputs, *blank]
            step(values)
            for target, value in zip(targets, values[len(inputs) :], strict=True):
                target.copy_(value)

        self.calls.append(run)
        return results

    def refresh(self) -> bool:
        """Copy parameters to where the calls read them; whether none is NaN or infinite."""
        for refresh in self.refreshes:
            refresh()
        return all(bool(np.isfinite(own).all()) for own in self._own)

    def log_sum(self, x: Array) -> Array:
        """``log(sum(exp(x)))`` over the last dimension, which is kept."""
        total = self.new((*x.shape[:-1], 1), x.dtype)
        if 2 <= x.shape[-1] <= _FEW:
            first, *others = (x[..., i] for i in range(x.shape[-1]))
            for other in others:
                self.put(np.logaddexp, first, other, total[..., 0])
                first = total[..., 0]
            return total
        top = self.new(total.shape, x.dtype)
        self.put(np.maximum.reduce, x, -1, None, top, True)
        powers = self.to(np.subtract, x, top, like=x)
        self.put(np.exp, powers, powers)
        self.put(np.add.reduce, powers, -1, None, total, True)
        self.put(np.log, total, total)
        self.put(np.add, total, top, total)
        return total
