"""Layers: what a policy's modules are taken apart into, and the table of those with functions of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor
from torch import Tensor, nn

from rollwright.errors import NotNative, PolicyError
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.nodes import Node, Step, Values, same_bits, same_generators
from rollwright.policies.watch import ModuleSnapshot, is_special


class KnownLayer(NamedTuple):
    """Implementation of modules of one type.

    Attributes:
        on_tensors: from a module and its input to its output.
        in_numpy: appends the calls in NumPy to an emitter, given the module and its input; None: there are none.
    """

    on_tensors: Callable[[Any, Tensor], Tensor]
    in_numpy: Callable[[Emitter, Any, Array], Array] | None = None


LAYERS: dict[type, KnownLayer] = {}


@dataclass(frozen=True)
class LayerCall(Node):
    """A module of a registered type, from one slot to one slot.

    Attributes:
        module: the module.
        layer: its functions.
    """

    module: nn.Module
    layer: KnownLayer

    @property
    def label(self) -> str:
        """The type."""
        return type(self.module).__name__

    def step(self) -> Step:
        """Call the function."""
        (source,), (target,) = self.reads, self.writes
        module, function = self.module, self.layer.on_tensors

        def run(values: Values) -> None:
            values[target] = function(module, values[source])

        return run

    def checked_step(self) -> Step:
        """The same, compared with the module."""
        (source,), step, function = self.reads, self.step(), self.layer.on_tensors

        def run(values: Values) -> None:
            x = values[source]
            with same_generators(x):
                expected = self.module(x.clone())
            with same_generators(x):
                result = function(self.module, x.clone())
            if not same_bits(result, expected):
                raise PolicyError(
                    f"policy: the function that register_layer was given for {self.label} returns something else than "
                    "the module. Return the tensor that forward returns, bit for bit."
                )
            step(values)

        return run

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Append the calls that do it in NumPy; the results."""
        (x,) = reads
        if self.layer.in_numpy is None or x.dtype not in ("float32", "float64"):
            raise NotNative(f"{self.label} of {x.dtype} is not known in NumPy")
        return [self.layer.in_numpy(emitter, self.module, x)]


def registered(module: Any) -> KnownLayer | None:
    """The functions of a module's type, where a call of the module is no more than its ``forward``."""
    found = LAYERS.get(type(module))
    return None if found is None or is_special(module) is not None else found


def unroll(module: Any, watch: ModuleSnapshot) -> list[Any]:
    """The modules that are called on one tensor where ``module`` is: the parts of a sequence, or itself.

    Args:
        module: an ``nn.Module`` or any callable.
        watch: is given the sequences.
    """
    if isinstance(module, nn.Sequential) and _is_sequence(module) and is_special(module) is None:
        watch.add(module)
        return [part for child in vars(module)["_modules"].values() for part in unroll(child, watch)]
    return [module]


def _is_sequence(module: nn.Module) -> bool:
    """Whether a call on one tensor runs the children, one after another, and no more."""
    kind: Any = type(module)
    if not isinstance(module, nn.Sequential) or kind.__call__ is not nn.Module.__call__:
        return False
    if f"{kind.__module__}.{kind.__qualname__}" == "torchrl.modules.models.models.MLP":
        return vars(module).get("_reshape_out") is False
    return kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__


def is_torchs(module: Any) -> bool:
    """Whether a module is a layer of torch, which may be called without the machinery for hooks."""
    if not isinstance(module, nn.Module) or is_special(module) is not None:
        return False
    return type(module).__module__.startswith(("torch.nn.modules.", "tensordict.nn."))


def makes_positive_scale(module: Any) -> bool:
    """Whether a module makes a location and a scale above zero."""
    kinds = (NormalParamExtractor, AddStateIndependentNormalScale)
    return type(module) in kinds and is_special(module) is None and module.scale_lb > 0
