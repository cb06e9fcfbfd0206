"""Traced: the calls that a module makes on tensors, as a node of a policy on arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rollwright.errors import NotNative
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.nodes import Node, Own, Step
from rollwright.policies.traced.in_numpy import IN_NUMPY, emit_op
from rollwright.policies.traced.recorder import Form, Op, Ref, Slot, Weight, form_of, mapped, refs_in

_MOST_FUSED = 2**16  #: elements of a matrix that a compiled program multiplies itself
_MAKES_NEW = {"avg_pool2d", "batch_norm", "conv1d", "conv2d", "conv3d", "gelu", "group_norm", "max_pool2d", "selu"}
_IN_PLACE: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, f"{name}_") for name in ("relu", "sigmoid", "tanh")},
    **{name: getattr(Tensor, f"{name}_") for name in ("add", "clamp_min", "div", "mul", "sub")},
}


@dataclass(frozen=True)
class Traced(Node):
    """Calls on tensors, in the order in which modules made them.

    Attributes:
        ops: the calls.
        results: of the slots that it writes, in their order.
        forms: shapes and dtypes of what it reads.
        plain: the calls that it stands for, which are made where what is read has another form.
    """

    ops: tuple[Op, ...]
    results: tuple[Ref, ...]
    forms: tuple[Form, ...]
    plain: tuple[Node, ...]

    transient: ClassVar[bool] = True

    @property
    def calls(self) -> int:
        """One per function."""
        return len(self.ops)

    @property
    def _own(self) -> dict[Slot, Form]:
        """Results of calls whose memory nothing else has when they are made, whatever the strides of the inputs are."""
        makes_new = {*IN_NUMPY, *_MAKES_NEW}
        return {Slot(op.writes[0]): op.forms[0] for op in self.ops if op.roots == (None,) and op.name in makes_new}

    @property
    def fresh(self) -> set[int]:
        """Slots written whose memory nothing else has."""
        pairs = zip(self.writes, self.results, strict=True)
        return {slot for slot, result in pairs if result in self._own and self.results.count(result) == 1}

    def then(self, after: Traced) -> Traced:
        """Both, as one."""
        own = {Slot(slot): result for slot, result in zip(self.writes, self.results, strict=True)}

        def moved(value: Any) -> Any:
            return mapped(value, Slot, lambda ref: own.get(ref, ref))

        new = [(slot, form) for slot, form in zip(after.reads, after.forms, strict=True) if Slot(slot) not in own]
        more = {slot: form for slot, form in new if slot not in self.reads}
        ops = [replace(op, args=moved(op.args), options=moved(op.options), roots=moved(op.roots)) for op in after.ops]
        return Traced(
            (*self.reads, *more),
            self.writes + after.writes,
            (*self.ops, *ops),
            (*self.results, *moved(after.results)),
            (*self.forms, *more.values()),
            self.plain + after.plain,
        )

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

        lines, plain = [], text([node.step() for node in self.plain])
        last = {ref: i for i, op in enumerate(self.ops) for ref in op.refs() if isinstance(ref, Slot)}
        for slot, (shape, dtype) in dict(zip(self.reads, self.forms, strict=True)).items():
            differs = f"v{slot}.shape != {text(shape)} or v{slot}.dtype != {text(dtype)}"
            lines += [f"v{slot} = values[{slot}]", f"if {differs}: return [step(values) for step in {plain}]"]
        for i, op in enumerate(self.ops):
            options = [f"{name}={text(value)}" for name, value in op.options.items()]
            function = _IN_PLACE[op.name] if self._in_place(i, op, last) else _chosen(op)
            call = f"{text(function)}({', '.join([*map(text, op.args), *options])})"
            lines.append(f"{''.join(f'v{slot}, ' for slot in op.writes)[: None if op.several else -2]} = {call}")
            done = [text(ref) for ref, at in last.items() if at == i and ref not in self.results]
            lines += [f"del {', '.join(done)}"] if done else []  # so that the next call takes its memory
        lines += [f"values[{slot}] = {text(ref)}" for slot, ref in zip(self.writes, self.results, strict=True)]
        names, made = [f"c{i}" for i in range(len(constants))], dict[str, Any]()
        body = "".join(f"        {line}\n" for line in lines)
        exec(f"def make({', '.join(names)}):\n    def step(values):\n{body}    return step\n", made)
        step: Step = made["make"](*constants)
        return step

    def _in_place(self, i: int, op: Op, last: Mapping[Slot, int]) -> bool:
        """Whether a call may write its result into the memory of its first argument, which nobody else reads."""
        first = op.args[0] if op.args else None
        if op.name not in _IN_PLACE or op.options or not isinstance(first, Slot) or last[first] != i:
            return False
        shared = [*self.results, *(ref for each in self.ops for ref in each.roots), *refs_in(op.args[1:])]
        return self._own.get(first) == op.forms[0] and first not in shared

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Append the calls that do it in NumPy; the results."""
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


def settled(nodes: Sequence[Node], read: Sequence[int]) -> list[Node]:
    """What runs from the second call on, where recorded nodes that follow one another are one.

    Args:
        nodes: as they ran in the first call.
        read: slots that are read after them.
    """
    made: list[Node] = []
    for node in (node.settled() for node in nodes):
        if made and isinstance(node, Traced) and isinstance(made[-1], Traced):
            made[-1] = made[-1].then(node)
        else:
            made.append(node)
    needed = {*read, *(slot for node in made for slot in node.reads)}
    for i, node in enumerate(made):
        if isinstance(node, Traced):
            kept = [pair for pair in zip(node.writes, node.results, strict=True) if pair[0] in needed]
            made[i] = replace(node, writes=tuple(slot for slot, _ in kept), results=tuple(ref for _, ref in kept))
    fresh = {slot for node in made if isinstance(node, Traced) for slot in node.fresh}
    return [node for node in made if not (isinstance(node, Own) and node.writes[0] in fresh)]


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
