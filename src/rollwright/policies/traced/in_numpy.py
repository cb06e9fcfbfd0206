"""The table of functions of torch that a NumPy program knows, as calls on fixed memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rollwright.errors import NotNative
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.traced.recorder import Op, Ref, Slot, Weight, mapped

_MOST_IN_TORCH = 2**12  #: numbers that a costly function makes which a NumPy program calls on tensors
_COSTLY: tuple[str, ...] = ("adaptive_", "avg_", "batch_norm", "bmm", "conv", "einsum", "group_norm", "interpolate")
_COSTLY += ("gru", "lstm", "matmul", "max_pool", "multi_head", "scaled_dot")
_Emit = Callable[..., Array | None]  # None: with such arguments, torch is called


def emit_op(emitter: Emitter, op: Op, find: Callable[[Ref], Array]) -> Sequence[Array]:
    """Append the calls that do in NumPy what ``op`` does; the results.

    What does not depend on inputs is computed once a rollout. A view of memory costs nothing. What NumPy lacks is
    called on tensors that share memory with the arrays, unless ``torch.compile`` is better at it.

    Args:
        emitter: collects the calls.
        op: a call on tensors.
        find: gives the memory of a tensor.

    Raises:
        NotNative: it is not known in NumPy, and too costly to call torch.
    """
    arrays = [find(ref) for ref in op.refs()]
    fixed = all(emitter.is_fixed(array) for array in arrays)
    if op.name.endswith("_") and not fixed and emitter.is_fixed(arrays[0]):
        raise NotNative(f"{op.name} changes what is computed once a rollout")
    if not fixed:
        return _emitted(emitter, op, find, arrays)
    with emitter.once():
        return emitter.fix(_emitted(emitter, op, find, arrays))


def _emitted(emitter: Emitter, op: Op, find: Callable[[Ref], Array], arrays: Sequence[Array]) -> Sequence[Array]:
    args, options = mapped((op.args, op.options), (Slot, Weight), find)
    emit = IN_NUMPY.get(op.name)
    if emit is not None and op.roots == (None,):
        out = emit(emitter, op, *args, **options)
        if out is not None:
            return [out]
    args, options = mapped((args, options), np.ndarray, torch.from_numpy)
    function: Any = partial(op.function, *args, **options)
    if op.name.endswith("_"):
        emitter.calls.append(function)
        return arrays[:1]
    if None not in op.roots:
        made = function()
        views = [each.numpy() for each in (made if op.several else (made,))]
        if all(any(np.may_share_memory(view, array) for array in arrays) for view in views):
            return views
    if op.name.startswith(_COSTLY) and sum(shape.numel() for shape, _ in op.forms) > _MOST_IN_TORCH:
        raise NotNative(f"{op.name} is not known in NumPy")
    outs = [_new(emitter, op, i) for i in range(len(op.forms))]
    targets = [torch.from_numpy(out) for out in outs]

    def run() -> None:
        made = function()
        for target, value in zip(targets, made if op.several else (made,), strict=True):
            target.copy_(value)

    emitter.calls.append(run)
    return outs


def _new(emitter: Emitter, op: Op, i: int = 0) -> Array:
    """Memory for a result."""
    shape, dtype = op.forms[i]
    try:
        return emitter.new(tuple(shape), torch.empty(0, dtype=dtype, device="cpu").numpy().dtype)
    except TypeError as error:  # bfloat16, as a rule
        raise NotNative(f"NumPy has no {dtype}") from error


# The table ----------------------------------------------------------------------------------------

_X, _OUT = "x", "out"  # the input and the result, in the calls of a recipe


def _recipe(recipe: Callable[..., Sequence[tuple[Any, ...]] | None]) -> _Emit:
    """Calls one after another that read the input or what is in the result, and write the result.

    Args:
        recipe: from the further arguments of the function to the calls; None: torch is called.
    """

    def emit(emitter: Emitter, op: Op, x: Array, *args: Any, inplace: bool = False, **options: Any) -> Array | None:
        numbers = all(type(each) in (int, float, type(None)) for each in (*args, *options.values()))
        if inplace or not numbers or x.dtype.kind != "f" or (calls := recipe(*args, **options)) is None:
            return None
        out = _new(emitter, op)
        for function, *operands in calls:
            emitter.put(function, *[x if each is _X else out if each is _OUT else each for each in operands], out=out)
        return out

    return emit


def _clamp(min: Any = None, max: Any = None) -> Sequence[tuple[Any, ...]]:
    first = [] if min is None else [(np.maximum, _X, min)]
    return [*first, *([] if max is None else [(np.minimum, _OUT if first else _X, max)])]


def _elu(alpha: float = 1.0) -> Sequence[tuple[Any, ...]] | None:
    scaled = [] if alpha == 1 else [(np.multiply, _OUT, alpha)]
    return [(np.minimum, _X, 0), (np.expm1, _OUT), *scaled, (np.maximum, _X, _OUT)] if 0 <= alpha <= 1 else None


def _leaky(negative_slope: float = 0.01) -> Sequence[tuple[Any, ...]] | None:
    return [(np.multiply, _X, negative_slope), (np.maximum, _X, _OUT)] if 0 <= negative_slope <= 1 else None


def _softplus(beta: float = 1, threshold: float = 20) -> Sequence[tuple[Any, ...]] | None:
    return [(np.logaddexp, _X, 0)] if beta == 1 and threshold >= 15 else None


# Through tanh, which does not overflow.
_SIGMOID = ((np.multiply, _X, 0.5), (np.tanh, _OUT), (np.multiply, _OUT, 0.5), (np.add, _OUT, 0.5))


def _ufunc(function: Any, *, swapped: bool = False) -> _Emit:
    """One call on two arrays, or on an array and a number."""

    def emit(emitter: Emitter, op: Op, *args: Any, **options: Any) -> Array | None:
        out = _new(emitter, op)
        if options or out.dtype.kind != "f" or not all(type(each) in (int, float, np.ndarray) for each in args):
            return None
        own = [_cast(emitter, each, out.dtype) if isinstance(each, np.ndarray) else each for each in args]
        emitter.put(function, *(reversed(own) if swapped else own), out=out)
        return out

    return emit


def _cast(emitter: Emitter, x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else _copied(emitter, x, emitter.new(x.shape, dtype))


def _copied(emitter: Emitter, x: Array, out: Array) -> Array:
    emitter.put(np.copyto, out, x, casting="unsafe")
    return out


def _to_dtype(emitter: Emitter, op: Op, x: Array, *args: Any, **options: Any) -> Array:
    return _copied(emitter, x, _new(emitter, op))


def _cat(emitter: Emitter, op: Op, arrays: Sequence[Array], dim: int = 0) -> Array | None:
    out = _new(emitter, op)
    if any(array.ndim != out.ndim for array in arrays):  # torch lets an empty vector pass
        return None
    ends = np.cumsum([array.shape[dim] for array in arrays])
    for array, part in zip(arrays, np.split(out, ends[:-1], dim), strict=True):
        _copied(emitter, array, part)
    return out


def _linear(emitter: Emitter, op: Op, x: Array, weight: Array, bias: Array | None = None) -> Array | None:
    known = x.dtype.kind == "f" and all(each is None or emitter.is_fixed(each) for each in (weight, bias))
    return linear_numpy(emitter, weight, bias, x) if known else None


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
        rows = x if x.flags.c_contiguous else _copied(emitter, x, emitter.new(x.shape, x.dtype))
        emitter.put(np.dot, rows.reshape(-1, x.shape[-1]), weight.T, out.reshape(-1, len(weight)))
    if bias is not None:
        emitter.put(np.add, out, bias, out)
    return out


def _layer_norm(
    emitter: Emitter, op: Op, x: Array, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Array | None:
    if len(shape) != 1 or x.dtype.kind != "f":
        return None
    mean, variance = (emitter.new((*x.shape[:-1], 1), x.dtype) for _ in range(2))
    emitter.put(np.add.reduce, x, -1, None, mean, True)
    emitter.put(np.divide, mean, x.shape[-1], mean)
    out = emitter.to(np.subtract, x, mean, like=x)
    emitter.put(np.add.reduce, emitter.to(np.multiply, out, out, like=x), -1, None, variance, True)
    for function, number in ((np.divide, [x.shape[-1]]), (np.add, [eps]), (np.sqrt, [])):
        emitter.put(function, variance, *number, variance)
    for scaled, other in ((np.divide, variance), (np.multiply, weight), (np.add, bias)):
        if other is not None:
            emitter.put(scaled, out, other, out)
    return out


_ONE = ("abs", "cos", "exp", "expm1", "log", "log1p", "sin", "sqrt", "square", "tanh")
_TWO = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide}
IN_NUMPY: dict[str, _Emit] = {
    **{name: _ufunc(getattr(np, name)) for name in (*_ONE, "maximum", "minimum")},
    **{name: _ufunc(function) for name, function in _TWO.items()},
    "rsub": _ufunc(np.subtract, swapped=True),
    "rdiv": _ufunc(np.true_divide, swapped=True),
    "neg": _ufunc(np.negative),
    "clamp": _recipe(_clamp),
    "clamp_min": _recipe(_clamp),
    "softplus": _recipe(_softplus),
    "sigmoid": _recipe(lambda: _SIGMOID),
    "silu": _recipe(lambda: (*_SIGMOID, (np.multiply, _X, _OUT))),
    "relu": _recipe(lambda: [(np.maximum, _X, 0)]),
    "elu": _recipe(_elu),
    "leaky_relu": _recipe(_leaky),
    "linear": _linear,
    "layer_norm": _layer_norm,
    "cat": _cat,
    "float": _to_dtype,
    "double": _to_dtype,
}
