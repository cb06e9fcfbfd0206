"""Traced: the calls that a module makes on tensors, as a node of a policy on arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rollwright.errors import NotNative
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.nodes import Node, Step
from rollwright.policies.traced.in_numpy import IN_NUMPY, emit_op
from rollwright.policies.traced.recorder import Form, Op, Ref, Slot, Weight, form_of, refs_in

_MOST_FUSED = 2**16  #: elements of a matrix that a compiled program multiplies itself
_MAKES_NEW = {"avg_pool2d", "batch_norm", "conv1d", "conv2d", "conv3d", "gelu", "group_norm", "max_pool2d", "selu"}


@dataclass(frozen=True)
class Traced(Node):
    """Calls on tensors, in the order in which a module made them.

    Attributes:
        ops: the calls.
        results: of the slots that it writes, in their order.
        forms: shapes and dtypes of what it reads.
        plain: the call that it stands for, which is made where what is read has another form.
    """

    ops: tuple[Op, ...]
    results: tuple[Ref, ...]
    forms: tuple[Form, ...]
    plain: Node

    transient: ClassVar[bool] = True

    @property
    def calls(self) -> int:
        """One per function."""
        return len(self.ops)

    @property
    def fresh(self) -> set[int]:
        """Slots written whose memory nothing else has, whatever the strides of the inputs are."""
        makes_new = {*IN_NUMPY, *_MAKES_NEW}
        own = {Slot(op.writes[0]) for op in self.ops if op.roots == (None,) and op.name in makes_new}
        pairs = zip(self.writes, self.results, strict=True)
        return {slot for slot, result in pairs if result in own and self.results.count(result) == 1}

    def step(self) -> Step:
        """A function that is written and compiled for these calls, a line for each."""
        constants: list[Any] = []

        def text(value: Any) -> str:
            if isinstance(value, Slot):
                return f"v{value.number}"
            if isinstance(value, Weight):
                return f"{text(value.owner)}[{value.name!r}]"
            if any(True for _ in refs_in(value)):  # of a list or tuple
                inner = "".join(f"{text(each)}, " for each in value)
                return f"[{inner}]" if type(value) is list else f"({inner})"
            constants.append(value)
            return f"c{len(constants) - 1}"

        lines, plain = [], text(self.plain.step())
        last = {ref: i for i, op in enumerate(self.ops) for ref in op.refs() if isinstance(ref, Slot)}
        for slot, (shape, dtype) in dict(zip(self.reads, self.forms, strict=True)).items():
            differs = f"v{slot}.shape != {text(shape)} or v{slot}.dtype != {text(dtype)}"
            lines += [f"v{slot} = values[{slot}]", f"if {differs}: return {plain}(values)"]
        for i, op in enumerate(self.ops):
            options = [f"{name}={text(value)}" for name, value in op.options.items()]
            call = f"{text(_chosen(op))}({', '.join([*map(text, op.args), *options])})"
            lines.append(f"{''.join(f'v{slot}, ' for slot in op.writes)[: None if op.several else -2]} = {call}")
            done = [text(ref) for ref, at in last.items() if at == i and ref not in self.results]
            lines += [f"del {', '.join(done)}"] if done else []  # so that the next call takes its memory
        lines += [f"values[{slot}] = {text(ref)}" for slot, ref in zip(self.writes, self.results, strict=True)]
        names, made = [f"c{i}" for i in range(len(constants))], dict[str, Any]()
        body = "".join(f"        {line}\n" for line in lines)
        exec(f"def make({', '.join(names)}):\n    def step(values):\n{body}    return step\n", made)
        step: Step = made["make"](*constants)
        return step

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """See :meth:`Node.emit`."""
        for array, form in zip(reads, self.forms, strict=True):
            if form_of(torch.from_numpy(array)) != form:
                raise NotNative(f"an entry is {array.dtype} {list(array.shape)}, and was {form[1]} {list(form[0])}")
        arrays: dict[int, Array] = dict(zip(self.reads, reads, strict=True))

        def find(ref: Ref) -> Array:
            array = arrays[ref.number] if isinstance(ref, Slot) else emitter.parameter(ref.owner, ref.name)
            if array is None:
                raise NotNative("a parameter is None now")
            return array

        for op in self.ops:
            arrays.update(zip(op.writes, emit_op(emitter, op, find), strict=True))
        return [find(result) for result in self.results]


# Linear layers of one vector ----------------------------------------------------------------------


def _chosen(op: Op) -> Callable[..., Any]:
    """The function; of a linear layer of one vector the call that it ends in, at half the price, if bits are equal."""
    if op.function is F.linear and len(op.forms[0][0]) == 1 and len(op.args) == 3 and isinstance(op.args[1], Weight):
        weight = op.args[1]()
        if op.args[2] is not None and weight.device.type == "cpu" and _addmv_is_exact(*weight.shape, weight.dtype):
            return _linear
    return op.function


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # Compiled, addmv is fused with what makes its input: slow for large ones of permuted images.
    fused = weight.numel() <= _MOST_FUSED or not torch.compiler.is_compiling()
    if fused and weight.is_contiguous() and x.is_contiguous():
        return torch.addmv(bias, weight, x)
    return F.linear(x, weight, bias)


@functools.cache
def _addmv_is_exact(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether ``addmv`` gives the bits of ``linear`` for one vector, with this machine's arithmetic."""
    generator = torch.Generator().manual_seed(0)
    try:
        shapes = (rows, columns), (rows,), (16, columns)
        weight, bias, inputs = (torch.randn(*shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
        return all(torch.equal(F.linear(x, weight, bias), torch.addmv(bias, weight, x)) for x in inputs)
    except RuntimeError:  # a dtype that one of them does not know
        return False
