"""Traced: the calls that modules make on tensors, as one node of a policy on arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rollwright.errors import NotNative
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.nodes import Node, Own, Step
from rollwright.policies.traced.in_numpy import IN_NUMPY, emit_op
from rollwright.policies.traced.ops import Form, Op, Ref, Slot, Weight, form_of, mapped, refs_in

_MOST_FUSED = 2**16  #: elements of a matrix that a compiled program multiplies itself
_MAKES_NEW = {"avg_pool2d", "batch_norm", "conv1d", "conv2d", "conv3d", "gelu", "group_norm", "max_pool2d", "selu"}
_IN_PLACE: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, f"{name}_") for name in ("exp", "neg", "relu", "sigmoid", "tanh")},
    **{name: getattr(Tensor, f"{name}_") for name in ("add", "clamp_min", "div", "mul", "sub")},
}


@dataclass(frozen=True)
class Traced(Node):
    """Calls on tensors, in the order in which modules made them.

    Attributes:
        ops: the calls.
        results: of the slots that it writes, in their order.
        forms: shapes and dtypes of what it reads.
        plain: the nodes that it stands for; they run where what is read has another form.
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
    def fresh(self) -> set[int]:
        """Slots written whose memory nothing else has."""
        own = {slot for op in self.ops if _is_fresh(op) for slot in op.writes}
        numbers = [result.number if isinstance(result, Slot) else None for result in self.results]
        return {slot for slot, n in zip(self.writes, numbers, strict=True) if n in own and numbers.count(n) == 1}

    @property
    def weights(self) -> list[Weight]:
        """The parameters and buffers that it reads, some of them more than once."""
        return [ref for ref in (*self.results, *_refs(self.ops)) if isinstance(ref, Weight)]

    def then(self, after: Traced) -> Traced:
        """Both, as one."""
        own = dict(zip(self.writes, self.results, strict=True))

        def moved(ref: Any) -> Any:
            return own.get(ref.number, ref) if isinstance(ref, Slot) else ref

        ops = [
            replace(op, args=mapped(op.args, Slot, moved), options=mapped(op.options, Slot, moved))
            for op in (replace(op, roots=tuple(map(moved, op.roots))) for op in after.ops)
        ]
        more = [(slot, form) for slot, form in zip(after.reads, after.forms, strict=True) if slot not in own]
        more = [(slot, form) for slot, form in dict(more).items() if slot not in self.reads]
        return Traced(
            (*self.reads, *map(itemgetter(0), more)),
            (*self.writes, *after.writes),
            (*self.ops, *ops),
            (*self.results, *map(moved, after.results)),
            (*self.forms, *map(itemgetter(1), more)),
            (*self.plain, *after.plain),
        )

    def without(self, unread: Collection[int]) -> Traced:
        """The same, but for slots that nobody reads."""
        kept = [pair for pair in zip(self.writes, self.results, strict=True) if pair[0] not in unread]
        return replace(self, writes=tuple(slot for slot, _ in kept), results=tuple(result for _, result in kept))

    def step(self) -> Step:
        """A function that is written and compiled for these calls."""
        run: Step = _Writer(self).function([node.step() for node in self.plain])
        return run

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """See :meth:`Node.emit`."""
        for array, form in zip(reads, self.forms, strict=True):
            if form_of(torch.from_numpy(array)) != form:
                raise NotNative(f"an entry is {array.dtype} {list(array.shape)}, and was {form[1]} {list(form[0])}")
        arrays: dict[int, Array] = dict(zip(self.reads, reads, strict=True))

        def find(ref: Ref) -> Array:
            if isinstance(ref, Slot):
                return arrays[ref.number]
            weight = emitter.parameter(ref.owner, ref.name)
            if weight is None:
                raise NotNative(f"{ref.name!r} is None now")
            return weight

        for op in self.ops:
            arrays.update(zip(op.writes, emit_op(emitter, op, find), strict=True))
        return [find(result) for result in self.results]


def settled(nodes: Sequence[Node], read: Collection[int]) -> list[Node]:
    """What runs from the second call on, where nodes that follow one another are one.

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
    made = [node.without(set(node.writes) - needed) if isinstance(node, Traced) else node for node in made]
    fresh = {slot for node in made if isinstance(node, Traced) for slot in node.fresh}
    return [node for node in made if not (isinstance(node, Own) and node.writes[0] in fresh)]


def _refs(ops: Sequence[Op]) -> Iterator[Ref]:
    return (ref for op in ops for ref in op.refs())


def _is_fresh(op: Op) -> bool:
    """Whether the result never shares memory, whatever the strides of the input are."""
    return op.roots == (None,) and (op.name in IN_NUMPY or op.name in _MAKES_NEW)


class _Writer:
    """Writes the source of a step: one line for each call, and names that are used again once a value is read."""

    def __init__(self, node: Traced) -> None:
        self._node = node
        self._constants: dict[str, Any] = {}
        self._owners: dict[int, str] = {}
        self._names = {slot: f"v{i}" for i, slot in enumerate(dict.fromkeys(node.reads))}
        self._free: list[str] = []
        self._count = len(self._names)
        self._forms = dict(zip(node.reads, node.forms, strict=True))
        self._roots: dict[int, Ref | None] = {}
        self._own: set[int] = set()  # values with memory of their own
        self._last: dict[int, int] = {}
        for i, op in enumerate(node.ops):
            self._last.update((ref.number, i) for ref in op.refs() if isinstance(ref, Slot))
        self._last.update((ref.number, len(node.ops)) for ref in node.results if isinstance(ref, Slot))

    def function(self, plain: Sequence[Step]) -> Any:
        """The step."""
        node, lines = self._node, []
        for slot, (shape, dtype) in self._forms.items():
            name, form = self._names[slot], (self._constant(shape), self._constant(dtype))
            lines += [f"{name} = values[{slot}]", f"if {name}.shape != {form[0]} or {name}.dtype != {form[1]}:"]
            lines += [f"    for step in {self._constant(plain)}:", "        step(values)", "    return"]
        for i, op in enumerate(node.ops):
            lines.append(self._line(i, op))
        lines += [f"values[{slot}] = {self._ref(ref)}" for slot, ref in zip(node.writes, node.results, strict=True)]
        body = "".join(f"        {line}\n" for line in lines or ["pass"])
        made: dict[str, Any] = {}
        exec(f"def make({', '.join(self._constants)}):\n    def step(values):\n{body}    return step\n", made)
        return made["make"](*self._constants.values())

    def _line(self, i: int, op: Op) -> str:
        function = self._constant(self._chosen(i, op))
        arguments = [self._argument(each) for each in op.args]
        arguments += [f"{name}={self._argument(each)}" for name, each in op.options.items()]
        for ref in {ref.number for ref in op.refs() if isinstance(ref, Slot)}:
            if self._last[ref] == i:
                self._free.append(self._names[ref])
        for slot, form, root in zip(op.writes, op.forms, op.roots, strict=True):
            self._forms[slot], self._roots[slot] = form, root
            if not self._free:
                self._free.append(f"v{self._count}")
                self._count += 1
            self._names[slot] = self._free.pop()
        if _is_fresh(op):
            self._own.update(op.writes)
        line = f"{function}({', '.join(arguments)})"
        targets = [self._names[slot] for slot in op.writes]
        for slot in op.writes:
            if slot not in self._last:
                self._free.append(self._names[slot])
        return f"{', '.join(targets)}{',' if op.several else ''} = {line}"

    def _chosen(self, i: int, op: Op) -> Callable[..., Any]:
        """The function, or a cheaper one that gives the same bits."""
        first = op.args[0] if op.args else None
        if op.function is F.linear and not op.options:
            return _linear_for(op, first, self._forms)
        if op.name not in _IN_PLACE or op.options or not isinstance(first, Slot):
            return op.function
        slot = first.number
        others = [ref for ref in op.refs() if ref is not first]
        alone = slot in self._own and self._last[slot] == i and Slot(slot) not in others
        if not alone or self._forms[slot] != op.forms[0] or any(self._shares(other, slot, i) for other in self._roots):
            return op.function
        return _IN_PLACE[op.name]

    def _shares(self, other: int, slot: int, i: int) -> bool:
        """Whether a value that is read now or later lies in the memory of another."""
        root: Any = Slot(other)
        while isinstance(root, Slot) and (further := self._roots.get(root.number)) is not None:
            root = further
        return other != slot and root == Slot(slot) and self._last.get(other, -1) >= i

    def _argument(self, value: Any) -> str:
        if isinstance(value, Slot | Weight):
            return self._ref(value)
        if type(value) in (list, tuple) and any(True for _ in refs_in(value)):
            inner = "".join(f"{self._argument(each)}, " for each in value)
            return f"[{inner}]" if type(value) is list else f"({inner})"
        return self._constant(value)

    def _ref(self, ref: Ref) -> str:
        if isinstance(ref, Slot):
            return self._names[ref.number]
        if id(ref.owner) not in self._owners:
            self._owners[id(ref.owner)] = self._constant(ref.owner)
        return f"{self._owners[id(ref.owner)]}[{ref.name!r}]"

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name


# Linear layers of one vector ----------------------------------------------------------------------


def _linear_for(op: Op, first: Any, forms: Mapping[int, Form]) -> Callable[..., Any]:
    """A layer of one vector as the call that it ends in, at half the price, where that gives the same bits."""
    weight, bias = op.args[1], op.args[2] if len(op.args) > 2 else None
    if not isinstance(first, Slot) or not isinstance(weight, Weight) or not isinstance(bias, Weight):
        return op.function
    matrix = weight()
    one = len(forms[first.number][0]) == 1 and matrix.device.type == "cpu"
    return _linear if one and _addmv_is_exact(*matrix.shape, matrix.dtype) else op.function


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
