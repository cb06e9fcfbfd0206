"""FunctionCall: a module or function of the policy, which is taken apart in its first step where it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rollwright.errors import NotNative
from rollwright.policies.layers import is_torchs
from rollwright.policies.nodes import Node, Outputs, Step, Values, generator_state, same_bits
from rollwright.policies.traced.code import inspect
from rollwright.policies.traced.node import Traced
from rollwright.policies.traced.recorder import Recorder, Weight, form_of, weights_of
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
        found: what the first step showed.
    """

    module: Any
    method: str | None
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    outputs: Outputs | None
    watch: ModuleSnapshot
    found: Found = field(default_factory=Found)

    @property
    def label(self) -> str:
        """The type of what is called."""
        return getattr(self.module, "__name__", type(self.module).__name__)

    @cached_property
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

    def settled(self) -> Node:
        """What runs from the second call on, once ``checked_step()`` has run."""
        return self.found.node or self

    def step(self) -> Step:
        """Collect the arguments, call, spread the results."""
        names, constants, reads, writes, outputs = self.names, self.constants, self.reads, self.writes, self.outputs
        function: Any = self.module.forward if self.known else self.module
        module, method = self.module, self.method

        def run(values: Values) -> None:
            given = [values[slot] for slot in reads]
            call = function if method is None else getattr(module, method)  # as TensorDictModule looks it up
            result = call(**dict(zip(names, given, strict=True)), **constants) if names else call(*given, **constants)
            for slot, value in zip(writes, (result,) if outputs is None else outputs(result), strict=True):
                values[slot] = value

        return run

    def checked_step(self) -> Step:
        """The call itself, and a first try of what may run in its place."""
        step = self.step()

        def run(values: Values) -> None:
            given, watch = {slot: values[slot] for slot in self.reads}, ModuleSnapshot()
            try:
                weights = self._inspected(given, watch)
                recorder = Recorder(given, weights)
            except Exception as error:  # whatever it is, the module is called
                self.found.why = str(error)
                step(values)
                return
            copies: Values = [each.clone() if i in given else None for i, each in enumerate(values)]
            kept = [*given.values(), *(weight() for weight in weights.values())]
            before = [[each._version for each in kept if not each.is_inference()], generator_state(kept[0])]
            with recorder:
                step(values)
            after = [[each._version for each in kept if not each.is_inference()], generator_state(kept[0])]
            try:
                self.found.node = self._repeated(recorder, copies, values, before, after)
                watch.check()
                self.watch.update(watch)
            except Exception as error:
                self.found.node, self.found.why = None, str(error)

        return run

    def _inspected(self, given: Mapping[int, Any], watch: ModuleSnapshot) -> dict[int, Weight]:
        """The parameters and buffers of what is called, by the ids of their tensors.

        Raises:
            NotNative: more than tensors would come of the call.
        """
        if not given or not all(isinstance(value, Tensor) for value in given.values()):
            raise NotNative("it reads no tensors")
        modules = inspect(self.module if self.method is None else getattr(self.module, self.method), watch)
        inspect(dict(self.constants), watch)
        weights = weights_of(modules, watch)
        if any(each().is_inference() or isinstance(each(), nn.UninitializedParameter) for each in weights.values()):
            raise NotNative("its parameters are not to be read yet")
        return weights

    def _repeated(
        self, recorder: Recorder, copies: Values, values: Values, before: Sequence[Any], after: Sequence[Any]
    ) -> Traced:
        """What was recorded, compared with the call.

        Raises:
            NotNative: it cannot be repeated, or gives other bits.
        """
        if recorder.why:
            raise NotNative(recorder.why)
        if not torch.equal(before[1], after[1]):
            raise NotNative("it draws random numbers")
        if before[0] != after[0]:
            raise NotNative("it changes a parameter, a buffer or an entry in place")
        refs = tuple(recorder.ref(values[slot]) for slot in self.writes)
        forms = tuple(form_of(copies[slot]) for slot in self.reads)
        plain = FunctionCall(
            self.reads, self.writes, self.module, self.method, self.names, self.constants, self.outputs, self.watch
        )
        node = Traced(self.reads, self.writes, tuple(recorder.ops), refs, forms, (plain,))
        try:
            node.step()(copies)
            same = all(same_bits(copies[slot], values[slot]) for slot in self.writes)
        except Exception as error:
            raise NotNative(f"its calls cannot be repeated: {error}") from error
        if not same:
            raise NotNative("its calls, repeated, gave other bits")
        return node
