"""Layers and distributions as NumPy calls on fixed memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import add
from typing import Any, cast

import numpy as np
import torch
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor, biased_softplus, mappings
from torch import nn
from torch.nn import functional as F

from rollwright.policies.base import NotFlat
from rollwright.policies.draws import CategoricalDraw, NormalDraw
from rollwright.policies.layers import Layer

__all__ = ["Emitter"]

Array = np.ndarray
_HALF_LOG_TAU = math.log(math.sqrt(2 * math.pi))
_FEW_CHOICES = 8  # outcomes of one draw up to which Python beats NumPy
_FEW = 4  # outcomes up to which a pairwise logaddexp beats exp, sum and log


class Emitter:
    """Collects calls that are bound to their memory: running the program is running ``calls``, one after another.

    Attributes:
        calls: take no arguments, and write into memory that stays the same.
        parameters: where parameters are, as dictionaries and names.
        noise: gives the next row of random numbers.
        refreshes: calls that copy parameters to where the other calls read them; to be run before a rollout.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.parameters: list[tuple[Mapping[str, torch.Tensor | None], str]] = []
        self.noise: Iterator[Array] = iter(())
        self.refreshes: list[Callable[[], Any]] = []
        self._own: list[Array] = []
        self._with_one: dict[int, tuple[Array, Array]] = {}

    def new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for one value; behind that of a vector stands a one, see :meth:`with_one`."""
        if len(shape) != 1:
            return np.empty(shape, dtype)
        longer = np.ones(shape[0] + 1, dtype)
        vector = longer[:-1]
        self._with_one[id(vector)] = vector, longer  # the vector too, so that no other gets its id
        return vector

    def with_one(self, vector: Array) -> Array:
        """A vector and a one behind it, by which a weight matrix with its bias as a last column is to be multiplied."""
        if id(vector) in self._with_one:
            return self._with_one[id(vector)][1]
        copied = self.new(vector.shape, vector.dtype)
        self.put(np.copyto, copied, vector)
        return self._with_one[id(copied)][1]

    def put(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Append a call."""
        if isinstance(function, np.ufunc):  # which take an array of no dimensions faster than a number
            dtype = next(value.dtype for value in arguments if isinstance(value, np.ndarray))
            arguments = tuple(np.asarray(v, dtype) if isinstance(v, int | float) else v for v in arguments)
        self.calls.append(partial(function, *arguments, **options))

    def to(self, function: Callable[..., Any], *arguments: Any, like: Array) -> Array:
        """Append a call that writes into new memory of the shape of ``like``, which is returned."""
        out = self.new(like.shape, like.dtype)
        self.put(function, *arguments, out=out)
        return out

    def parameter(self, module: nn.Module, name: str, dtype: Any) -> Array | None:
        """Memory that holds a parameter or buffer as it is when a rollout begins; None if the module has none.

        Raises:
            NotFlat: it is of another dtype than the data.
        """
        owner = module._parameters if name in module._parameters else module._buffers
        tensor = owner.get(name)
        self.parameters.append((owner, name))
        if tensor is None:
            return None
        if tensor.device.type != "cpu" or tensor.detach().numpy().dtype != dtype:
            raise NotFlat(f"a parameter is {tensor.dtype} and the data are {dtype}")
        own = np.empty(tuple(tensor.shape), dtype)
        self.refreshes.append(lambda: np.copyto(own, cast(torch.Tensor, owner[name]).detach().numpy()))
        self._own.append(own)
        return own

    def forms(self) -> list[Any]:
        """Shapes and dtypes of the parameters; as long as they are the same, so is the program."""
        tensors = [owner.get(name) for owner, name in self.parameters]
        return [tensor if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]

    def finite(self) -> bool:
        """Whether no parameter is NaN or infinite."""
        return all(bool(np.isfinite(own).all()) for own in self._own)

    def layer(self, layer: Layer, x: Array) -> tuple[Array, ...]:
        """Append the calls of one layer on ``x``; its results.

        Raises:
            NotFlat: the layer is not known here.
        """
        emit = _LAYERS.get(type(layer.module))
        if emit is None or layer.outputs is None:
            raise NotFlat(f"{type(layer.module).__name__} is not known in NumPy")
        if x.dtype not in (np.float32, np.float64):
            raise NotFlat(f"{type(layer.module).__name__} reads {x.dtype}")
        result = emit(self, layer.module, x)
        return result if isinstance(result, tuple) else (result,)

    # Distributions ----------------------------------------------------------------------------

    def categorical(self, draw: CategoricalDraw, logits: Array) -> list[Array]:
        """Append a draw (or the mode) of a categorical distribution; the action, and the log-prob where asked for."""
        if draw.parameter != "logits":
            raise NotFlat("a Categorical of probabilities")
        index = self.new(logits.shape[:-1], np.int64)
        if logits.ndim == 1 and len(logits) <= _FEW_CHOICES:
            chosen = self.new((), logits.dtype) if len(draw.writes) == 2 else None
            self.calls.append(self._one_choice(logits, index, chosen, draw.random))
            return self._as_action(draw, logits, index) + ([] if chosen is None else [chosen])
        if draw.random:
            # exp(logits) / noise is largest where logits - log(noise) is; the noise comes as -log(noise).
            raced, add = np.empty_like(logits), np.add
            self.calls.append(lambda: add(logits, next(self.noise), raced))
            self.put(raced.argmax, -1, index)
        else:
            self.put(logits.argmax, -1, index)
        return self._as_action(draw, logits, index) + ([self._score(logits, index)] if len(draw.writes) == 2 else [])

    def _as_action(self, draw: CategoricalDraw, logits: Array, index: Array) -> list[Array]:
        if not draw.one_hot:
            return [index]
        return [self.to(np.equal, np.arange(logits.shape[-1]), index[..., None], like=logits)]

    def _one_choice(self, logits: Array, index: Array, score: Array | None, random: bool) -> Callable[[], None]:
        """One draw of few outcomes, in plain Python: numbers are cheaper than arrays of one."""
        exp, log, place = math.exp, math.log, ()

        def choose() -> None:
            values = logits.tolist()
            raced = list(map(add, values, next(self.noise).tolist())) if random else values
            chosen = raced.index(max(raced))
            index[place] = chosen
            if score is not None:
                top = max(values)
                score[place] = values[chosen] - top - log(sum([exp(value - top) for value in values]))

        return choose

    def _score(self, logits: Array, index: Array) -> Array:
        """The normalised logit at ``index``."""
        place = index
        if index.ndim:
            starts = np.arange(index.size).reshape(index.shape) * logits.shape[-1]
            place = self.to(np.add, index, starts, like=index)
        chosen = self.new(index.shape, logits.dtype)
        self.put(logits.reshape(-1).take, place, None, chosen, "clip")
        return self.to(np.subtract, chosen, self.log_sum(logits)[..., 0], like=chosen)

    def log_sum(self, x: Array) -> Array:
        """``log(sum(exp(x)))`` over the last dimension, which is kept."""
        total = self.new((*x.shape[:-1], 1), x.dtype)
        if 2 <= x.shape[-1] <= _FEW:
            first, *others = (x[..., i] for i in range(x.shape[-1]))
            for other in others:
                self.put(np.logaddexp, first, other, total[..., 0])
                first = total[..., 0]
            return total
        top = self.new(total.shape, x.dtype)
        self.put(np.maximum.reduce, x, -1, None, top, True)
        powers = self.to(np.subtract, x, top, like=x)
        self.put(np.exp, powers, powers)
        self.put(np.add.reduce, powers, -1, None, total, True)
        self.put(np.log, total, total)
        self.put(np.add, total, top, total)
        return total

    def normal(self, draw: NormalDraw, loc: Array, scale: Array) -> list[Array]:
        """Append a draw (or the mean) of a normal distribution; the value, and the log-prob where asked for."""
        shape = np.broadcast_shapes(loc.shape, scale.shape)
        z = np.zeros(shape, loc.dtype)
        value = np.empty_like(z)
        if draw.random:
            copy = np.copyto
            self.calls.append(lambda: copy(z, next(self.noise)))
        self.put(np.multiply, z, scale, value)
        self.put(np.add, loc, value, value)
        if len(draw.writes) == 1:
            return [value]
        score = self.to(np.multiply, z, z, like=z)
        self.put(np.multiply, score, -0.5, score)
        self.put(np.subtract, score, self.to(np.log, scale, like=scale), score)
        self.put(np.subtract, score, _HALF_LOG_TAU, score)
        return [value, score]


def _linear(emitter: Emitter, module: nn.Linear, x: Array) -> Array:
    weight, bias = emitter.parameter(module, "weight", x.dtype), emitter.parameter(module, "bias", x.dtype)
    if weight is None:
        raise NotFlat("a Linear has no weight")
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


def _layer_norm(emitter: Emitter, module: nn.LayerNorm, x: Array) -> Array:
    if len(module.normalized_shape) != 1:
        raise NotFlat("LayerNorm over several dimensions is not known in NumPy")
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


def _elu(emitter: Emitter, module: nn.ELU, x: Array) -> Array:
    out = emitter.to(np.minimum, x, 0, like=x)
    emitter.put(np.expm1, out, out)
    if module.alpha != 1:
        emitter.put(np.multiply, out, module.alpha, out)
    emitter.put(np.add, out, emitter.to(np.maximum, x, 0, like=x), out)
    return out


def _leaky(emitter: Emitter, module: nn.LeakyReLU, x: Array) -> Array:
    if not 0 <= module.negative_slope <= 1:
        raise NotFlat("LeakyReLU with such a slope is not known in NumPy")
    out = emitter.to(np.multiply, x, module.negative_slope, like=x)
    emitter.put(np.maximum, x, out, out=out)
    return out


def _sigmoid(emitter: Emitter, module: Any, x: Array) -> Array:
    out = emitter.to(np.multiply, x, 0.5, like=x)  # through tanh, which does not overflow
    emitter.put(np.tanh, out, out)
    emitter.put(np.multiply, out, 0.5, out)
    emitter.put(np.add, out, 0.5, out)
    return out


def _silu(emitter: Emitter, module: nn.SiLU, x: Array) -> Array:
    return emitter.to(np.multiply, x, _sigmoid(emitter, module, x), like=x)


def _gelu(emitter: Emitter, module: nn.GELU, x: Array) -> Array:
    out = emitter.new(x.shape, x.dtype)  # NumPy has no erf
    source, target = torch.from_numpy(x), torch.from_numpy(out)
    emitter.put(lambda: target.copy_(F.gelu(source, approximate=module.approximate)))
    return out


def _softplus(emitter: Emitter, module: nn.Softplus, x: Array) -> Array:
    if module.beta != 1 or module.threshold < 15:
        raise NotFlat("Softplus with such settings is not known in NumPy")
    return emitter.to(np.logaddexp, x, 0, like=x)


def _softmax(emitter: Emitter, module: Any, x: Array) -> Array:
    if module.dim not in (-1, x.ndim - 1):
        raise NotFlat(f"{type(module).__name__} of another dimension than the last is not known in NumPy")
    out = emitter.to(np.subtract, x, emitter.log_sum(x), like=x)
    if type(module) is nn.Softmax:
        emitter.put(np.exp, out, out)
    return out


def _dropout(emitter: Emitter, module: nn.Dropout, x: Array) -> Array:
    if module.training:
        raise NotFlat("Dropout is training")
    return x


def _flatten(emitter: Emitter, module: nn.Flatten, x: Array) -> Array:
    return x.reshape(torch.empty(x.shape).flatten(module.start_dim, module.end_dim).shape)


def _extractor(emitter: Emitter, module: NormalParamExtractor, x: Array) -> tuple[Array, Array]:
    half = (x.shape[-1] + 1) // 2
    loc, raw = x[..., :half], x[..., half:]
    return loc, _scale(emitter, module.scale_mapping, module.scale_lb, raw)


def _free_scale(emitter: Emitter, module: AddStateIndependentNormalScale, x: Array) -> tuple[Array, Array]:
    raw = emitter.parameter(module, "state_independent_scale", x.dtype)
    if raw is None:
        raise NotFlat("an AddStateIndependentNormalScale has no scale")
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
        raise NotFlat("the mapping of a scale is not known in NumPy")
    emitter.put(np.maximum, out, bound, out=out)
    return out


_LAYERS: dict[type, Callable[[Emitter, Any, Array], Any]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    nn.Identity: lambda emitter, module, x: x,
    nn.Dropout: _dropout,
    nn.Flatten: _flatten,
    nn.Tanh: lambda emitter, module, x: emitter.to(np.tanh, x, like=x),
    nn.ReLU: lambda emitter, module, x: emitter.to(np.maximum, x, 0, like=x),
    nn.Sigmoid: _sigmoid,
    nn.Softplus: _softplus,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.ELU: _elu,
    nn.GELU: _gelu,
    nn.SiLU: _silu,
    nn.LeakyReLU: _leaky,
    NormalParamExtractor: _extractor,
    AddStateIndependentNormalScale: _free_scale,
}
