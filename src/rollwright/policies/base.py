"""ArrayPolicy: the interface of a policy on arrays."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright.errors import NotNative, PolicyError
from rollwright.policies.watch import ModuleSnapshot


class ArrayPolicy(abc.ABC):
    """A policy from arrays to arrays; the same bits and the same random numbers as the policy it was made of.

    Attributes:
        in_keys: entries read from the root, each once.
        out_keys: entries written, each once. Complete after the first call of a rollout.
        finite_keys: those of ``out_keys`` that turn NaN when the policy's numbers do. The plain path tests the
            parameters of a distribution at each step; who runs it tests these, once a batch.
        how: what runs, in a short phrase.
        varies: whether shapes and dtypes of the outputs may differ from call to call.
        kept: those of ``in_keys`` that it reads as it wrote them in the step before, with their values in a first one.
        frozen: whether the weights of a rollout's start act in all of it.
    """

    in_keys: list[NestedKey]
    out_keys: list[NestedKey]
    finite_keys: list[NestedKey]
    how: str
    varies: bool = True
    frozen: bool = False
    kept: Mapping[NestedKey, np.ndarray] = MappingProxyType({})

    @abc.abstractmethod
    def start(self, steps: int) -> None:
        """Prepare a rollout of ``steps`` calls.

        Raises:
            NotNative: the policy has changed since (hooks, modules, settings). Make it again, or run it plain.
        """

    @abc.abstractmethod
    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """The outputs for one step, in memory of their own.

        Args:
            inputs: ``[*batch, ...]`` each, writeable, in the order of ``in_keys``.

        Returns:
            One array per entry of ``out_keys``.
        """


class TensorPolicy(ArrayPolicy):
    """A policy on arrays that calls torch on tensors."""

    @abc.abstractmethod
    def tensors(self, *inputs: Tensor) -> Sequence[Tensor]:
        """As a call, on tensors of the policy's device."""

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """The outputs for one step, in memory of their own."""
        outputs = self.tensors(*map(_from_numpy, inputs))
        try:
            return [value.numpy() for value in outputs]
        except TypeError as error:  # bfloat16, as a rule
            raise NotNative(f"NumPy has no such output: {error}") from error


_from_numpy: Any = torch.from_numpy


def array_of(value: Tensor) -> np.ndarray:
    """The array over a tensor's memory, on the CPU; a parameter's, too.

    Raises:
        TypeError: NumPy does not have the dtype.
    """
    array: np.ndarray = (value.detach() if value.requires_grad else value).numpy()
    return array


class WatchedPolicy(TensorPolicy):
    """A policy made of modules, which notices that they have changed, and tests the shapes of its outputs."""

    def __init__(self, watch: ModuleSnapshot, batch_shape: tuple[int, ...]) -> None:
        self.batch_shape = torch.Size(batch_shape)
        self._watch = watch
        self._shapes_seen = False

    def watch(self, thing: Any) -> None:
        """Notice that something else has changed, too."""
        self._watch.add(thing)

    def start(self, steps: int) -> None:
        """Prepare a rollout of ``steps`` calls."""
        self._watch.check()
        self._shapes_seen = False

    def _check_shapes(self, values: Sequence[Tensor]) -> None:
        """Test, once a rollout, that outputs begin with the batch size, as entries of a TensorDict must."""
        batch = self.batch_shape
        for key, value in zip(self.out_keys, values, strict=True):
            if value.shape[: len(batch)] != batch:
                raise PolicyError(
                    f"policy: it wrote {key!r} with shape {list(value.shape)}, which must begin with the batch size of "
                    f"the environment, {list(batch)}. Keep the leading dimensions."
                )
        self._shapes_seen = True
