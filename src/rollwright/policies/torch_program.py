"""A policy on arrays through ``torch.compile``, with the noise of known distributions as an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollwright.policies.base import TensorPolicy
from rollwright.policies.draws.noise import Noise, noise_stream
from rollwright.policies.nodes import Draw, Node, Step, Values
from rollwright.policies.program import Program


class TorchProgram(TensorPolicy):
    """The steps of a program in one compiled function; those from an unknown distribution on stay as they are.

    Parameters are inputs of the compiled function, so that new weights keep it.

    Args:
        program: the steps.
        example: inputs, for the shapes of the noise.
        arguments: of ``torch.compile``.
    """

    def __init__(self, program: Program, example: Sequence[Tensor], arguments: Mapping[str, Any]) -> None:
        self.in_keys, self.out_keys = program.in_keys, program.out_keys
        self.finite_keys, self.kept = program.finite_keys, program.kept
        self._program = program
        compiled = _up_to_unknown(program.nodes)
        values = program.values(*example)
        steps: list[Step] = []
        self._noises: list[Noise] = []
        for node in program.nodes[:compiled]:
            noise = node.noise([values[slot] for slot in node.reads]) if isinstance(node, Draw) else None
            if noise is None or not isinstance(node, Draw):
                steps.append(node.step())
            else:
                steps.append(node.step_with(len(program.blank) + len(self._noises)))
                self._noises.append(noise)
        self._given = [*program.in_slots, *range(len(program.blank), len(program.blank) + len(self._noises))]
        later = program.nodes[compiled:]
        written = {slot for node in program.nodes[:compiled] for slot in node.writes}
        self._kept = sorted(written & {*program.out_slots, *(slot for node in later for slot in node.reads)})
        self._later = [node.step() for node in later]
        self._blank: Values = [None] * (len(program.blank) + len(self._noises))
        self._run = torch.compile(_function(steps, self._blank, self._given, self._kept), **arguments)
        self._noise: Iterator[Tensor] = iter(())
        self.how = "torch.compile of " + program.how

    def start(self, steps: int) -> None:
        """Draw the noise of ``steps`` steps; see :class:`~rollwright.policies.ArrayPolicy`."""
        self._program.start(steps)
        if self._noises:
            self._noise = noise_stream(self._noises, steps, Tensor.unbind)

    def tensors(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The compiled function, and the steps after it."""
        given = [*inputs, *[next(self._noise) for _ in self._noises]]
        values = self._blank.copy()
        for slot, value in zip(self._given, given, strict=True):
            values[slot] = value
        for slot, value in zip(self._kept, self._run(*given), strict=True):
            values[slot] = value
        for step in self._later:
            step(values)
        return [values[slot] for slot in self._program.out_slots]


def _function(
    steps: Sequence[Step], blank: Values, given: Sequence[int], kept: Sequence[int]
) -> Callable[..., tuple[Tensor, ...]]:
    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = list(blank)
        for slot, value in zip(given, tensors, strict=True):
            values[slot] = value
        for step in steps:
            step(values)
        return tuple(values[slot] for slot in kept)

    # The compiler keeps its programs by code object and stops after a few: each policy needs one of its own.
    run.__code__ = run.__code__.replace()
    return run


def _up_to_unknown(nodes: Sequence[Node]) -> int:
    """How many nodes come before the first whose steps cannot be compiled."""
    return next((i for i, node in enumerate(nodes) if not node.compiles), len(nodes))
