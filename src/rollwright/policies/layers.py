"""Layers that are called as functions of a tensor, without the machinery of ``nn.Module``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor, biased_softplus
from torch import Tensor, nn
from torch.nn import functional as F

from rollwright.policies.watch import Watch, is_special

__all__ = ["Layer", "reuse_memory", "unroll"]

Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Layer:
    """One call in a chain.

    Attributes:
        module: where the call comes from; its parameters are read at each call.
        call: from the input to the output.
        outputs: how many tensors come out; None where that shows only in a call (an unknown module).
        fresh: whether the output has memory of its own.
        in_place: the same call in the memory of an input that nobody reads any more.
    """

    module: Any
    call: Function
    outputs: int | None = 1
    fresh: bool = True
    in_place: Function | None = None


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
        if make is not None and _has_its_parameters(module):
            for part in module.modules():
                watch.add(part)
            return [make(module)]
    return [Layer(module, module, outputs=None, fresh=False)]


def _has_its_parameters(module: nn.Module) -> bool:
    """Whether what the type keeps as parameters are parameters (or None), and no tensors in their place."""
    names = {nn.Linear: ("weight", "bias"), nn.LayerNorm: ("weight", "bias")}.get(type(module), ())
    return all(name in module._parameters for name in names)


def reuse_memory(layers: list[Layer]) -> list[Layer]:
    """The same calls, in the memory of the result before where only they read it."""
    reusing = layers[:1]
    for before, layer in pairwise(layers):
        reusing.append(replace(layer, call=layer.in_place) if layer.in_place and before.fresh else layer)
    return reusing


def _linear(module: nn.Linear) -> Layer:
    parameters: dict[str, Any] = module._parameters
    linear, addmv = F.linear, torch.addmv
    weight, bias = parameters["weight"], parameters["bias"]
    if bias is None or weight.device.type != "cpu" or not _addmv_is_exact(*weight.shape, weight.dtype):
        return Layer(module, lambda x: linear(x, parameters["weight"], parameters["bias"]))

    def call(x: Tensor) -> Tensor:
        weight, bias = parameters["weight"], parameters["bias"]
        if x.ndim == 1 and bias is not None and weight.is_contiguous() and x.is_contiguous():
            return addmv(bias, weight, x)  # what linear ends in, at half the price
        return linear(x, weight, bias)

    return Layer(module, call)


@functools.cache
def _addmv_is_exact(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether ``addmv`` gives the bits of ``linear`` for one vector, with this machine's arithmetic."""
    generator = torch.Generator().manual_seed(0)
    try:
        weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, columns), (rows,)))
        inputs = torch.randn(16, columns, generator=generator).to(dtype)
        return all(torch.equal(F.linear(x, weight, bias), torch.addmv(bias, weight, x)) for x in inputs)
    except RuntimeError:  # a dtype that one of them does not know
        return False


def _layer_norm(module: nn.LayerNorm) -> Layer:
    parameters: dict[str, Any] = module._parameters
    shape, eps = module.normalized_shape, module.eps
    return Layer(module, lambda x: F.layer_norm(x, shape, parameters["weight"], parameters["bias"], eps))


def _identity(module: nn.Module) -> Layer:
    return Layer(module, _same, fresh=False)


def _same(x: Tensor) -> Tensor:
    return x


def _dropout(module: nn.Dropout) -> Layer:
    return Layer(module, module, fresh=False) if module.training else _identity(module)  # with p=0 it gives its input


def _flatten(module: nn.Flatten) -> Layer:
    first, last = module.start_dim, module.end_dim
    return Layer(module, lambda x: x.flatten(first, last), fresh=False)


def _softmax(function: Callable[..., Tensor]) -> Callable[[Any], Layer]:
    def make(module: Any) -> Layer:
        dim = module.dim
        return Layer(module, module if dim is None else lambda x: function(x, dim))

    return make


def _fixed(function: Function, in_place: Function) -> Callable[[nn.Module], Layer]:
    """An activation without settings."""
    return lambda module: Layer(module, function, in_place=in_place)


def _forward(module: Any) -> Layer:
    """A module whose ``forward`` is called without the hooks' machinery, and may work in place."""
    return Layer(module, module.forward, fresh=not getattr(module, "inplace", False))


def _relu(module: nn.ReLU) -> Layer:
    if module.inplace:
        return Layer(module, torch.relu_, fresh=False)
    return Layer(module, torch.relu, in_place=torch.relu_)


def _softplus(module: nn.Softplus) -> Layer:
    beta, threshold = module.beta, module.threshold
    return Layer(module, lambda x: F.softplus(x, beta, threshold))


def _extractor(module: NormalParamExtractor) -> Layer:
    mapping: Any = module.scale_mapping
    bound: Any = module.scale_lb

    def extract(x: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = x.chunk(2, -1)
        return loc, mapping(scale).clamp_min(bound)

    def extract_softplus(x: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = x.chunk(2, -1)
        return loc, F.softplus(scale + mapping.bias).add_(mapping.min_val).clamp_min_(bound)

    plain = type(mapping) is biased_softplus and is_special(mapping) is None
    return Layer(module, extract_softplus if plain else extract, outputs=2, fresh=False)  # loc is a view of the input


def _free_scale(module: AddStateIndependentNormalScale) -> Layer:
    return Layer(module, module.forward, outputs=2, fresh=False)


_MAKERS: dict[type, Callable[[Any], Layer]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.Identity: _identity,
    nn.Dropout: _dropout,
    nn.Flatten: _flatten,
    nn.Tanh: _fixed(torch.tanh, torch.tanh_),
    nn.Sigmoid: _fixed(torch.sigmoid, torch.sigmoid_),
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
