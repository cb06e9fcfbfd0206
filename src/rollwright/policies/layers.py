"""The table of layers: how each runs as a function of a tensor, and as NumPy calls on fixed memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor, biased_softplus, mappings
from torch import Tensor, nn
from torch.nn import functional as F

from rollwright.errors import NotNative
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.nodes import Layer
from rollwright.policies.watch import ModuleSnapshot, is_special

__all__ = ["LAYERS", "KnownLayer", "unroll"]


_MOST_FUSED = 2**16  #: elements of a matrix that a compiled program multiplies itself


class KnownLayer(NamedTuple):
    """Implementation of modules of one type.

    Attributes:
        on_tensors: makes the call on tensors of a module.
        in_numpy: appends the calls in NumPy to an emitter, given the module and its input; None: there are none.
        parameters: names of what must be a parameter of the module, or None.
    """

    on_tensors: Callable[[Any], Layer]
    in_numpy: Callable[[Emitter, Any, Array], Any] | None = None
    parameters: tuple[str, ...] = ()


# Layers with parameters ---------------------------------------------------------------------------


def _linear(module: nn.Linear) -> Layer:
    parameters: dict[str, Any] = vars(module)["_parameters"]
    linear, addmv, is_compiling = F.linear, torch.addmv, torch.compiler.is_compiling
    weight, bias = parameters["weight"], parameters["bias"]
    if bias is None or weight.device.type != "cpu" or not _addmv_is_exact(*weight.shape, weight.dtype):
        return Layer(module, lambda x: linear(x, parameters["weight"], parameters["bias"]))

    def call(x: Tensor) -> Tensor:
        weight, bias = parameters["weight"], parameters["bias"]
        one = x.ndim == 1 and bias is not None and weight.is_contiguous() and x.is_contiguous()
        # Compiled, addmv is fused with what makes its input: slow for large ones of permuted images.
        if one and (weight.numel() <= _MOST_FUSED or not is_compiling()):
            return addmv(bias, weight, x)  # what linear ends in, at half the price
        return linear(x, weight, bias)

    return Layer(module, call)


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


def _linear_numpy(emitter: Emitter, module: nn.Linear, x: Array) -> Array:
    weight, bias = emitter.parameter(module, "weight", x.dtype), emitter.parameter(module, "bias", x.dtype)
    return linear_numpy(emitter, weight, bias, x)


def linear_numpy(emitter: Emitter, weight: Array | None, bias: Array | None, x: Array) -> Array:
    """Append the calls of ``x @ weight.T + bias`` over the last dimension; the result.

    Raises:
        NotNative: there is no weight.
    """
    if weight is None:
        raise NotNative("a Linear has no weight")
    out = emitter.new((*x.shape[:-1], len(weight)), x.dtype)
    if x.ndim == 1 and bias is not None:  # one call for both
        both = np.empty((len(weight), len(x) + 1), x.dtype)
        emitter.refreshes += [partial(np.copyto, both[:, :-1], weight), partial(np.copyto, both[:, -1], bias)]
        emitter.put(np.dot, both, emitter.with_one(x), out)
        return out
    if x.ndim == 1:
        emitter.put(np.dot, weight, x, out)
    else:
        emitter.put(np.dot, x.reshape(-1, x.shape[-1]), weight.T, out.reshape(-1, len(weight)))
    if bias is not None:
        emitter.put(np.add, out, bias, out)
    return out


def _layer_norm(module: nn.LayerNorm) -> Layer:
    parameters: dict[str, Any] = vars(module)["_parameters"]
    shape, eps = module.normalized_shape, module.eps
    return Layer(module, lambda x: F.layer_norm(x, shape, parameters["weight"], parameters["bias"], eps))


def _layer_norm_numpy(emitter: Emitter, module: nn.LayerNorm, x: Array) -> Array:
    if len(module.normalized_shape) != 1:
        raise NotNative("LayerNorm over several dimensions is not known in NumPy")
    mean, variance = emitter.new((*x.shape[:-1], 1), x.dtype), emitter.new((*x.shape[:-1], 1), x.dtype)
    emitter.put(np.add.reduce, x, -1, None, mean, True)
    emitter.put(np.divide, mean, x.shape[-1], mean)
    out = emitter.to(np.subtract, x, mean, like=x)
    emitter.put(np.add.reduce, emitter.to(np.multiply, out, out, like=x), -1, None, variance, True)
    emitter.put(np.divide, variance, x.shape[-1], variance)
    emitter.put(np.add, variance, module.eps, variance)
    emitter.put(np.sqrt, variance, variance)
    emitter.put(np.divide, out, variance, out)
    weight, bias = emitter.parameter(module, "weight", x.dtype), emitter.parameter(module, "bias", x.dtype)
    if weight is not None:
        emitter.put(np.multiply, out, weight, out)
    if bias is not None:
        emitter.put(np.add, out, bias, out)
    return out


# Activations --------------------------------------------------------------------------------------


def _fixed(function: Callable[[Any], Any], in_place: Callable[[Any], Any]) -> Callable[[nn.Module], Layer]:
    """An activation without settings."""
    return lambda module: Layer(module, function, in_place=in_place)


def _ufunc(function: Any, *arguments: Any) -> Callable[[Emitter, Any, Array], Array]:
    """One call in NumPy."""
    return lambda emitter, module, x: emitter.to(function, x, *arguments, like=x)


def _forward(module: Any) -> Layer:
    """A module whose ``forward`` is called without the hooks' machinery, and may work in place."""
    return Layer(module, module.forward, fresh=not getattr(module, "inplace", False))


def _pool(module: Any) -> Layer:
    """A pool; where it returns indices too, a call of the module, whose outputs show in the call."""
    indices = getattr(module, "return_indices", False)
    return Layer(module, module, outputs=None, fresh=False) if indices else _forward(module)


def _relu(module: nn.ReLU) -> Layer:
    if module.inplace:
        return Layer(module, torch.relu_, fresh=False)
    return Layer(module, torch.relu, in_place=torch.relu_)


def _softplus(module: nn.Softplus) -> Layer:
    beta, threshold = module.beta, module.threshold
    return Layer(module, lambda x: F.softplus(x, beta, threshold))


def _softplus_numpy(emitter: Emitter, module: nn.Softplus, x: Array) -> Array:
    if module.beta != 1 or module.threshold < 15:
        raise NotNative("Softplus with such settings is not known in NumPy")
    return emitter.to(np.logaddexp, x, 0, like=x)


def _softmax(function: Callable[..., Tensor]) -> Callable[[Any], Layer]:
    def make(module: Any) -> Layer:
        dim = module.dim
        return Layer(module, module if dim is None else lambda x: function(x, dim))

    return make


def _softmax_numpy(emitter: Emitter, module: Any, x: Array) -> Array:
    if module.dim not in (-1, x.ndim - 1):
        raise NotNative(f"{type(module).__name__} of another dimension than the last is not known in NumPy")
    out = emitter.to(np.subtract, x, emitter.log_sum(x), like=x)
    if type(module) is nn.Softmax:
        emitter.put(np.exp, out, out)
    return out


def _elu_numpy(emitter: Emitter, module: nn.ELU, x: Array) -> Array:
    out = emitter.to(np.minimum, x, 0, like=x)
    emitter.put(np.expm1, out, out)
    if module.alpha != 1:
        emitter.put(np.multiply, out, module.alpha, out)
    emitter.put(np.add, out, emitter.to(np.maximum, x, 0, like=x), out)
    return out


def _leaky_numpy(emitter: Emitter, module: nn.LeakyReLU, x: Array) -> Array:
    if not 0 <= module.negative_slope <= 1:
        raise NotNative("LeakyReLU with such a slope is not known in NumPy")
    out = emitter.to(np.multiply, x, module.negative_slope, like=x)
    emitter.put(np.maximum, x, out, out=out)
    return out


def _sigmoid_numpy(emitter: Emitter, module: Any, x: Array) -> Array:
    out = emitter.to(np.multiply, x, 0.5, like=x)  # through tanh, which does not overflow
    emitter.put(np.tanh, out, out)
    emitter.put(np.multiply, out, 0.5, out)
    emitter.put(np.add, out, 0.5, out)
    return out


def _silu_numpy(emitter: Emitter, module: nn.SiLU, x: Array) -> Array:
    return emitter.to(np.multiply, x, _sigmoid_numpy(emitter, module, x), like=x)


def _gelu_numpy(emitter: Emitter, module: nn.GELU, x: Array) -> Array:
    out = emitter.new(x.shape, x.dtype)  # NumPy has no erf
    source, target = torch.from_numpy(x), torch.from_numpy(out)
    emitter.put(lambda: target.copy_(F.gelu(source, approximate=module.approximate)))
    return out


# Shapes -------------------------------------------------------------------------------------------


def _identity(module: nn.Module) -> Layer:
    return Layer(module, _same, fresh=False)


def _same(x: Tensor) -> Tensor:
    return x


def _dropout(module: nn.Dropout) -> Layer:
    return Layer(module, module, fresh=False) if module.training else _identity(module)  # with p=0 it gives its input


def _dropout_numpy(emitter: Emitter, module: nn.Dropout, x: Array) -> Array:
    if module.training:
        raise NotNative("Dropout is training")
    return x


def _flatten(module: nn.Flatten) -> Layer:
    first, last = module.start_dim, module.end_dim
    return Layer(module, lambda x: x.flatten(first, last), fresh=False)


def _flatten_numpy(emitter: Emitter, module: nn.Flatten, x: Array) -> Array:
    return x.reshape(torch.empty(x.shape, device="cpu").flatten(module.start_dim, module.end_dim).shape)


# Parameters of normal distributions ---------------------------------------------------------------


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


def _extractor_numpy(emitter: Emitter, module: NormalParamExtractor, x: Array) -> tuple[Array, Array]:
    half = (x.shape[-1] + 1) // 2
    loc, raw = x[..., :half], x[..., half:]
    return loc, _scale(emitter, module.scale_mapping, module.scale_lb, raw)


def _free_scale(module: AddStateIndependentNormalScale) -> Layer:
    return Layer(module, module.forward, outputs=2, fresh=False)


def _free_scale_numpy(emitter: Emitter, module: AddStateIndependentNormalScale, x: Array) -> tuple[Array, Array]:
    raw = emitter.parameter(module, "state_independent_scale", x.dtype)
    if raw is None:
        raise NotNative("an AddStateIndependentNormalScale has no scale")
    scale = emitter.new(x.shape, x.dtype)
    emitter.put(np.copyto, scale, _scale(emitter, mappings(module.scale_mapping), module.scale_lb, raw))
    return x, scale


def _scale(emitter: Emitter, mapping: Any, bound: Any, x: Array) -> Array:
    """A positive scale of at least ``bound``."""
    if type(mapping) is biased_softplus:
        out = emitter.to(np.add, x, mapping.bias, like=x)
        emitter.put(np.logaddexp, out, 0, out)
        emitter.put(np.add, out, mapping.min_val, out)
    elif mapping is F.softplus:
        out = emitter.to(np.logaddexp, x, 0, like=x)
    elif mapping is torch.exp:
        out = emitter.to(np.exp, x, like=x)
    else:
        raise NotNative("the mapping of a scale is not known in NumPy")
    emitter.put(np.maximum, out, bound, out=out)
    return out


LAYERS: dict[type, KnownLayer] = {
    nn.Linear: KnownLayer(_linear, _linear_numpy, ("weight", "bias")),
    nn.LayerNorm: KnownLayer(_layer_norm, _layer_norm_numpy, ("weight", "bias")),
    nn.Identity: KnownLayer(_identity, lambda emitter, module, x: x),
    nn.Dropout: KnownLayer(_dropout, _dropout_numpy),
    nn.Flatten: KnownLayer(_flatten, _flatten_numpy),
    nn.Tanh: KnownLayer(_fixed(torch.tanh, torch.tanh_), _ufunc(np.tanh)),
    nn.Sigmoid: KnownLayer(_fixed(torch.sigmoid, torch.sigmoid_), _sigmoid_numpy),
    nn.ReLU: KnownLayer(_relu, _ufunc(np.maximum, 0)),
    nn.Softplus: KnownLayer(_softplus, _softplus_numpy),
    nn.Softmax: KnownLayer(_softmax(torch.softmax), _softmax_numpy),
    nn.LogSoftmax: KnownLayer(_softmax(torch.log_softmax), _softmax_numpy),
    nn.ELU: KnownLayer(_forward, _elu_numpy),
    nn.SELU: KnownLayer(_forward),
    nn.CELU: KnownLayer(_forward),
    nn.GELU: KnownLayer(_forward, _gelu_numpy),
    nn.SiLU: KnownLayer(_forward, _silu_numpy),
    nn.Mish: KnownLayer(_forward),
    nn.ReLU6: KnownLayer(_forward),
    nn.LeakyReLU: KnownLayer(_forward, _leaky_numpy),
    nn.Hardtanh: KnownLayer(_forward),
    nn.Hardswish: KnownLayer(_forward),
    nn.Softsign: KnownLayer(_forward),
    nn.LogSigmoid: KnownLayer(_forward),
    nn.PReLU: KnownLayer(_forward),
    NormalParamExtractor: KnownLayer(_extractor, _extractor_numpy),
    AddStateIndependentNormalScale: KnownLayer(_free_scale, _free_scale_numpy),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), KnownLayer(_forward, parameters=("weight", "bias"))),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm), KnownLayer(_forward)),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), KnownLayer(_pool)),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), KnownLayer(_pool)),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), KnownLayer(_forward)),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), KnownLayer(_forward)),
    **dict.fromkeys((nn.Embedding, nn.ZeroPad2d, nn.Unflatten, nn.Upsample), KnownLayer(_forward)),
}


def _is_sequence(module: nn.Module) -> bool:
    """Whether a call on one tensor runs the children, one after another, and no more."""
    kind: Any = type(module)
    if not isinstance(module, nn.Sequential) or kind.__call__ is not nn.Module.__call__:
        return False
    if f"{kind.__module__}.{kind.__qualname__}" == "torchrl.modules.models.models.MLP":
        return vars(module).get("_reshape_out") is False
    return kind.forward is nn.Sequential.forward and kind.__iter__ is nn.Sequential.__iter__


def unroll(module: Any, watch: ModuleSnapshot) -> list[Layer]:
    """The calls that ``module`` makes on one tensor.

    A module that is not in the table, or that has hooks, is one call of itself, so that whatever it does acts.

    Args:
        module: an ``nn.Module`` or any callable.
        watch: is given the modules whose inside was read.
    """
    if isinstance(module, nn.Module) and is_special(module) is None:
        if _is_sequence(module):
            watch.add(module)
            return [layer for child in vars(module)["_modules"].values() for layer in unroll(child, watch)]
        known = LAYERS.get(type(module))
        if known is not None and all(name in vars(module)["_parameters"] for name in known.parameters):
            for part in module.modules():
                watch.add(part)
            return [replace(known.on_tensors(module), in_numpy=known.in_numpy)]
    return [Layer(module, module, outputs=None, fresh=False, transient=False)]
