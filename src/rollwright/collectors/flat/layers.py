"""Layers that are called as functions of a tensor, without the machinery of ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor, biased_softplus
from torch import Tensor, nn
from torch.nn import functional as F

from rollwright.collectors.flat.watch import Watch, is_special

__all__ = ["Layer", "unroll"]

Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Layer:
    """One call in a chain.

    Attributes:
        module: where the call comes from; its parameters are read at each call.
        call: from the input to the output.
        outputs: how many tensors come out; None where that shows only in a call (an unknown module).
        fresh: whether the output has memory of its own.
    """

    module: Any
    call: Function
    outputs: int | None = 1
    fresh: bool = True


def unroll(module: Any, watch: Watch) -> list[Layer]:
    """The calls that ``module`` makes on one tensor.

    A module that is not known, or that has hooks, is one call of itself, so that whatever it does acts.

    Args:
        module: an ``nn.Module`` or any callable.
        watch: learns of the modules whose inside was read.
    """
    if not isinstance(module, nn.Module):
        return [Layer(module, module, outputs=None, fresh=False)]
    if is_special(module) is None:
        if type(module) is nn.Sequential:
            watch.add(module)
            return [layer for child in module for layer in unroll(child, watch)]
        make = _MAKERS.get(type(module))
        if make is not None:
            for part in module.modules():
                watch.add(part)
            return [make(module)]
    return [Layer(module, module, outputs=None, fresh=False)]


def _linear(module: nn.Linear) -> Layer:
    parameters: dict[str, Any] = module._parameters
    linear = F.linear
    return Layer(module, lambda x: linear(x, parameters["weight"], parameters["bias"]))


def _layer_norm(module: nn.LayerNorm) -> Layer:
    parameters: dict[str, Any] = module._parameters
    shape, eps = module.normalized_shape, module.eps
    return Layer(module, lambda x: F.layer_norm(x, shape, parameters["weight"], parameters["bias"], eps))


def _identity(module: nn.Module) -> Layer:
    return Layer(module, _same, fresh=False)


def _same(x: Tensor) -> Tensor:
    return x


def _dropout(module: nn.Dropout) -> Layer:
    return Layer(module, module, fresh=not module.inplace) if module.training else _identity(module)


def _flatten(module: nn.Flatten) -> Layer:
    first, last = module.start_dim, module.end_dim
    return Layer(module, lambda x: x.flatten(first, last), fresh=False)


def _softmax(function: Callable[..., Tensor]) -> Callable[[Any], Layer]:
    def make(module: Any) -> Layer:
        dim = module.dim
        return Layer(module, module if dim is None else lambda x: function(x, dim))

    return make


def _fixed(function: Function) -> Callable[[nn.Module], Layer]:
    """An activation without settings."""
    return lambda module: Layer(module, function)


def _forward(module: Any) -> Layer:
    """A module whose ``forward`` is called without the hooks' machinery, and may work in place."""
    return Layer(module, module.forward, fresh=not getattr(module, "inplace", False))


def _relu(module: nn.ReLU) -> Layer:
    return Layer(module, torch.relu_ if module.inplace else torch.relu, fresh=not module.inplace)


def _softplus(module: nn.Softplus) -> Layer:
    beta, threshold = module.beta, module.threshold
    return Layer(module, lambda x: F.softplus(x, beta, threshold))


def _extractor(module: NormalParamExtractor) -> Layer:
    mapping, bound = module.scale_mapping, module.scale_lb
    if type(mapping) is biased_softplus and is_special(mapping) is None:
        bias, least = mapping.bias, mapping.min_val

        def mapping(x: Tensor) -> Tensor:
            return F.softplus(x + bias) + least

    def extract(x: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = x.chunk(2, -1)
        return loc, mapping(scale).clamp_min(bound)

    return Layer(module, extract, outputs=2, fresh=False)  # loc is a view of the input


def _free_scale(module: AddStateIndependentNormalScale) -> Layer:
    return Layer(module, module.forward, outputs=2, fresh=False)


_MAKERS: dict[type, Callable[[Any], Layer]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.Identity: _identity,
    nn.Dropout: _dropout,
    nn.Flatten: _flatten,
    nn.Tanh: _fixed(torch.tanh),
    nn.Sigmoid: _fixed(torch.sigmoid),
    nn.ReLU: _relu,
    nn.Softplus: _softplus,
    nn.Softmax: _softmax(torch.softmax),
    nn.LogSoftmax: _softmax(torch.log_softmax),
    nn.ELU: _forward,
    nn.SELU: _forward,
    nn.CELU: _forward,
    nn.GELU: _forward,
    nn.SiLU: _forward,
    nn.Mish: _forward,
    nn.ReLU6: _forward,
    nn.LeakyReLU: _forward,
    nn.Hardtanh: _forward,
    nn.Hardswish: _forward,
    nn.Softsign: _forward,
    nn.LogSigmoid: _forward,
    NormalParamExtractor: _extractor,
    AddStateIndependentNormalScale: _free_scale,
}
