"""A flat policy as a NumPy program: calls bound to fixed memory, with random numbers drawn once a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from rollwright._keys import NestedKey
from rollwright.policies.arrays import Emitter
from rollwright.policies.base import NotFlat
from rollwright.policies.draws import CategoricalDraw, NormalDraw
from rollwright.policies.nodes import Chain, Copy, Node, Own
from rollwright.policies.noise import Noise, noise_stream
from rollwright.policies.program import Program, counted

__all__ = ["NumpyProgram"]


class NumpyProgram:
    """Runs the steps of a :class:`~rollwright.policies.program.Program` in NumPy.

    Results agree with torch's to rounding. Equal random numbers give equal actions, except where two outcomes tie to
    rounding. New weights, in place or as new tensors, act from the next start on. Infinite or NaN weights give NaN
    without a warning; test ``finite_keys``.

    Args:
        program: the steps.
        example: inputs, for shapes and dtypes.

    Raises:
        NotFlat: a step is not known in NumPy.
    """

    def __init__(self, program: Program, example: Sequence[np.ndarray]) -> None:
        self.in_keys: list[NestedKey] = program.in_keys
        self.out_keys: list[NestedKey] = program.out_keys
        self.finite_keys: list[NestedKey] = program.finite_keys
        self.varies, self.frozen = False, True
        self._program = program
        self._example = [(value.shape, value.dtype) for value in example]
        self._emit()
        self.how = f"NumPy program of {counted(len(self._calls), 'call')}"

    def _emit(self) -> None:
        """Bind every call to its memory and to the parameters of now."""
        emitter = Emitter()
        self._inputs = [emitter.new(shape, dtype) for shape, dtype in self._example]
        values: dict[int, np.ndarray] = dict(zip(self._program.in_slots, self._inputs, strict=True))
        self._noises: list[Noise] = []
        for node in self._program.nodes:
            results = self._node(emitter, node, [values[slot] for slot in node.reads])
            values.update(zip(node.writes, results, strict=True))
        self._emitter, self._calls = emitter, emitter.calls
        self._outputs = [values[slot] for slot in self._program.out_slots]
        self._bound = emitter.forms()

    def _node(self, emitter: Emitter, node: Node, reads: list[np.ndarray]) -> Sequence[np.ndarray]:
        if isinstance(node, Chain):
            results: tuple[np.ndarray, ...] = tuple(reads)
            for layer in node.layers:
                if len(results) != 1:
                    raise NotFlat("a layer reads several values")
                if getattr(layer.module, "inplace", False) and np.shares_memory(results[0], reads[0]):
                    raise NotFlat(f"{type(layer.module).__name__} changes an entry in place")
                results = emitter.layer(layer, results[0])
            if len(results) != len(node.writes):
                raise NotFlat("the outputs of a layer do not match its out_keys")
            return results
        if isinstance(node, CategoricalDraw):
            if node.random:
                self._noises.append(_noise("gumbel", reads[0]))
            return emitter.categorical(node, reads[0])
        if isinstance(node, NormalDraw):
            if node.random:
                self._noises.append(_noise("normal", np.broadcast_arrays(*reads)[0]))
            return emitter.normal(node, *reads)
        if isinstance(node, Copy | Own):
            return reads
        raise NotFlat(f"{node.label} is not known in NumPy")

    def start(self, steps: int) -> None:
        """Draw the random numbers of ``steps`` steps; see :class:`~rollwright.policies.FlatPolicy`."""
        self._program.start(steps)
        if self._emitter.forms() != self._bound:
            self._emit()
        for refresh in self._emitter.refreshes:
            refresh()
        self._finite = self._emitter.finite()
        if self._noises:
            self._emitter.noise = noise_stream(self._noises, steps, _rows)

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """Run the calls, and give the results in memory of their own."""
        return self._run(inputs) if self._finite else self._run_in_silence(inputs)

    @np.errstate(all="ignore")  # weights have diverged, which `finite_keys` tell
    def _run_in_silence(self, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return self._run(inputs)

    def _run(self, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        for own, value in zip(self._inputs, inputs, strict=True):
            own[...] = value
        for call in self._calls:
            call()
        return [value.copy() for value in self._outputs]


def _noise(kind: Literal["gumbel", "normal"], like: np.ndarray) -> Noise:
    return Noise(kind, like.shape, torch.from_numpy(np.empty(0, like.dtype)).dtype, torch.device("cpu"))


def _rows(block: torch.Tensor) -> list[np.ndarray]:
    return list(block.numpy()) if block.ndim > 1 else [row.numpy() for row in block]
