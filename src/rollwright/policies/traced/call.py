"""FunctionCall: a module or function of the policy, which is taken apart in its first step where it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.errors import NotNative
from rollwright.policies.layers import is_torchs
from rollwright.policies.nodes import Node, Outputs, Step, Values, generator_state, same_bits
from rollwright.policies.traced.code import inspect
from rollwright.policies.traced.node import Traced
from rollwright.policies.traced.ops import Weight, form_of
from rollwright.policies.traced.recorder import Recorder, weights_of
from rollwright.policies.watch import ModuleSnapshot


@dataclass
class Found:
    """What the first step showed of a call.

    Attributes:
        node: what runs in its place; None: nothing does.
        why: the reason.
    """

    node: Traced | None = None
    why: str = ""


@dataclass(frozen=True)
class FunctionCall(Node):
    """A call of a module or function.

    In its first step, the calls that it makes on tensors are recorded, and repeated on copies of what it was given.
    Where they give the same bits, they run in its place from then on.

    Attributes:
        module: what is called.
        method: the name of its method; None: itself.
        names: of the arguments; empty for positional ones.
        constants: further keyword arguments.
        outputs: turns the result into one tensor per slot; None: the result is the value of the slot.
        watch: is given what was read of the modules.
        new_slot: gives a slot that nothing else has.
        found: what the first step showed.
    """

    module: Any
    method: str | None
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    outputs: Outputs | None
    watch: ModuleSnapshot
    new_slot: Callable[[], int]
    found: Found = field(default_factory=Found)

    @property
    def label(self) -> str:
        """The type of what is called."""
        return getattr(self.module, "__name__", type(self.module).__name__)

    @property
    def known(self) -> bool:  # type: ignore[override]
        """See :class:`Node`; layers of torch."""
        return self.method is None and is_torchs(self.module)

    @property
    def transient(self) -> bool:  # type: ignore[override]
        """See :class:`Node`; layers of torch."""
        return self.known

    @property
    def why(self) -> str:  # type: ignore[override]
        """Why it is called as it is, where the user may wonder."""
        return "" if self.known else self.found.why

    @property
    def _function(self) -> Callable[..., Any]:
        """What to call; a method is looked up at each call, as ``TensorDictModule`` does."""
        module, method = self.module, self.method
        if method is not None:
            return lambda *arguments, **options: getattr(module, method)(*arguments, **options)
        function: Callable[..., Any] = module.forward if self.known else module
        return function

    def settled(self) -> Node:
        """See :meth:`Node.settled`."""
        return self.found.node or self

    def step(self) -> Step:
        """Collect the arguments, call, spread the results."""
        call, reads, writes, spread = self._call(), self.reads, self.writes, self._spread
        if len(reads) == 1 == len(writes) and self.outputs is None and not self.names and not self.constants:
            (source,), (target,), function = reads, writes, self._function

            def run_one(values: Values) -> None:
                values[target] = function(values[source])

            return run_one

        def run(values: Values) -> None:
            results = spread(call([values[slot] for slot in reads]))
            for slot, value in zip(writes, results, strict=True):
                values[slot] = value

        return run

    def checked_step(self) -> Step:
        """The call itself, and a first try of what may run in its place."""

        def run(values: Values) -> None:
            given, watch = [values[slot] for slot in self.reads], ModuleSnapshot()
            try:
                weights = self._inspected(given, watch)
            except NotNative as error:
                self.found.why = str(error)
                self.step()(values)
                return
            for slot, value in zip(self.writes, self._recorded(given, weights, watch), strict=True):
                values[slot] = value

        return run

    def _call(self) -> Callable[[Sequence[Any]], Any]:
        function, names, constants = self._function, self.names, self.constants
        if names:
            return lambda arguments: function(**dict(zip(names, arguments, strict=True)), **constants)
        return lambda arguments: function(*arguments, **constants)

    def _spread(self, result: Any) -> Sequence[Any]:
        return (result,) if self.outputs is None else self.outputs(result)

    def _inspected(self, given: Sequence[Any], watch: ModuleSnapshot) -> dict[int, Weight]:
        """The parameters and buffers of what is called, by the ids of their tensors.

        Raises:
            NotNative: more than tensors would come of the call.
        """
        if not given or not all(isinstance(value, Tensor) for value in given):
            raise NotNative("it reads no tensors")
        modules = inspect(self.module if self.method is None else getattr(self.module, self.method), watch)
        inspect(dict(self.constants), watch)
        weights = weights_of(modules, watch)
        if any(each().is_inference() or isinstance(each(), nn.UninitializedParameter) for each in weights.values()):
            raise NotNative("its parameters are not to be read yet")
        return weights

    def _recorded(self, given: Sequence[Tensor], weights: dict[int, Weight], watch: ModuleSnapshot) -> Sequence[Any]:
        """The results of the call, which is recorded."""
        kept = [weight() for weight in weights.values()]
        copies = [value.clone() for value in given]
        versions, state = _versions([*kept, *given]), generator_state(given[0])
        with Recorder(zip(self.reads, given, strict=True), weights, self.new_slot) as recorder:
            result = self._call()(given)
        results = self._spread(result)
        try:
            if recorder.why:
                raise NotNative(recorder.why)
            if not torch.equal(generator_state(given[0]), state):
                raise NotNative("it draws random numbers")
            if _versions([*kept, *given]) != versions:
                raise NotNative("it changes a parameter, a buffer or an entry in place")
            watch.check()
            refs, forms = tuple(map(recorder.ref, results)), tuple(map(form_of, given))
            node = Traced(self.reads, self.writes, tuple(recorder.ops), refs, forms, (replace(self, found=Found()),))
            self._compare(node, copies, results)
        except NotNative as error:
            self.found.why = str(error)
        else:
            self.found.node = node
            self.watch.update(watch)
        return results

    def _compare(self, node: Traced, copies: Sequence[Tensor], results: Sequence[Any]) -> None:
        size = 1 + max(*self.reads, *self.writes)
        values: Values = [None] * size
        for slot, value in zip(self.reads, copies, strict=True):
            values[slot] = value
        try:
            node.step()(values)
            same = all(same_bits(values[slot], value) for slot, value in zip(self.writes, results, strict=True))
        except Exception as error:
            raise NotNative(f"its calls cannot be repeated: {error}") from error
        if not same:
            raise NotNative("its calls, repeated, gave other bits")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was changed in place."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
