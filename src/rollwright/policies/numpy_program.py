"""A policy as a NumPy program: calls bound to fixed memory, with random numbers drawn once a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rollwright.errors import NotNative
from rollwright.policies.base import ArrayPolicy
from rollwright.policies.draws.noise import noise_stream
from rollwright.policies.emitter import Emitter
from rollwright.policies.program import Program, counted


class NumpyProgram(ArrayPolicy):
    """Runs the steps of a :class:`~rollwright.policies.program.Program` in NumPy.

    Results agree with torch's to rounding. Equal random numbers give equal actions, except where two outcomes tie to
    rounding. New weights, in place or as new tensors, act from the next start on. Infinite or NaN weights give NaN
    without a warning; test ``finite_keys``.

    Args:
        program: the steps.
        example: inputs, for shapes and dtypes.

    Raises:
        NotNative: a step is not known in NumPy.
    """

    def __init__(self, program: Program, example: Sequence[np.ndarray]) -> None:
        self.in_keys, self.out_keys, self.finite_keys = program.in_keys, program.out_keys, program.finite_keys
        self.varies, self.frozen, self.kept = False, True, program.kept
        self._program = program
        self._example = [(value.shape, value.dtype) for value in example]
        torch_steps = any(node.in_torch for node in program.nodes)
        self._values = program.values(*map(torch.from_numpy, example)) if torch_steps else []
        self._emit()
        self.how = f"NumPy program of {counted(len(self._calls), 'call')}"

    def _emit(self) -> None:
        """Bind every call to its memory and to the parameters of now."""
        emitter = Emitter()
        self._inputs = [emitter.new(shape, dtype) for shape, dtype in self._example]
        values: dict[int, np.ndarray] = dict(zip(self._program.in_slots, self._inputs, strict=True))
        for node in self._program.nodes:
            reads = [values[slot] for slot in node.reads]
            if node.in_torch:
                count = len(reads)
                apart = replace(node, reads=tuple(range(count)), writes=tuple(range(count, count + len(node.writes))))
                examples = [self._values[slot] for slot in node.writes]
                results: Sequence[np.ndarray] = emitter.step_in_torch(apart.step(), reads, examples, node.draws)
            else:
                results = node.emit(emitter, *reads)
            values.update(zip(node.writes, results, strict=True))
        if emitter.draws_in_torch and emitter.noises:
            raise NotNative("distributions that are drawn at once and step by step would change their order")
        self._emitter, self._calls = emitter, emitter.calls
        self._outputs = [values[slot] for slot in self._program.out_slots]

    def start(self, steps: int) -> None:
        """Draw the random numbers of ``steps`` steps; see :class:`~rollwright.policies.ArrayPolicy`."""
        self._program.start(steps)
        self._finite = self._emitter.refresh()
        if self._emitter.noises:
            self._emitter.noise = noise_stream(self._emitter.noises, steps, _rows)

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """Run the calls, and give the results in memory of their own."""
        return self._run(inputs) if self._finite else self._run_in_silence(inputs)

    @np.errstate(all="ignore")  # weights that diverged are found by `finite_keys`
    def _run_in_silence(self, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return self._run(inputs)

    def _run(self, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        for own, value in zip(self._inputs, inputs, strict=True):
            own[...] = value
        for call in self._calls:
            call()
        return [value.copy() for value in self._outputs]


def _rows(block: torch.Tensor) -> list[np.ndarray]:
    return list(block.numpy()) if block.ndim > 1 else [row.numpy() for row in block]
