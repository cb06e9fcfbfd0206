"""The table of functions of torch that a NumPy program knows, as calls on fixed memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rollwright.errors import NotNative
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.traced.ops import Op, Ref, Slot, Weight, mapped

_MOST_IN_TORCH = 2**12  #: numbers that a costly function makes which a NumPy program calls on tensors
_COSTLY: tuple[str, ...] = ("adaptive_", "avg_", "batch_norm", "bmm", "conv", "einsum", "group_norm", "interpolate")
_COSTLY += ("gru", "lstm", "matmul", "max_pool", "multi_head", "scaled_dot")
_Emit = Callable[..., Array | None]  # None: with such arguments, torch is called


def emit_op(emitter: Emitter, op: Op, find: Callable[[Ref], Array]) -> Sequence[Array]:
    """Append the calls that do in NumPy what ``op`` does; the results.

    What does not depend on inputs is computed once a rollout. A view of memory costs nothing.

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
        return _emitted(emitter, op, find)
    with emitter.once():
        return emitter.fix(_emitted(emitter, op, find))


def _emitted(emitter: Emitter, op: Op, find: Callable[[Ref], Array]) -> Sequence[Array]:
    kinds = (Slot, Weight)
    if all(root is not None for root in op.roots) and not op.name.endswith("_"):
        args, options = (mapped(each, kinds, lambda ref: torch.from_numpy(find(ref))) for each in (op.args, op.options))
        made = op.function(*args, **options)
        views = [each.numpy() for each in (made if op.several else (made,))]
        if all(any(np.may_share_memory(view, find(ref)) for ref in op.refs()) for view in views):
            return views
    emit = IN_NUMPY.get(op.name)
    if emit is not None and not op.several:
        args, options = (mapped(each, kinds, find) for each in (op.args, dict(op.options)))
        out = emit(emitter, op, *args, **options)
        if out is not None:
            return [out]
    return _in_torch(emitter, op, find)


def _in_torch(emitter: Emitter, op: Op, find: Callable[[Ref], Array]) -> Sequence[Array]:
    """The function on tensors that share memory with the arrays, unless ``torch.compile`` is better at it."""
    if op.name.startswith(_COSTLY) and sum(shape.numel() for shape, _ in op.forms) > _MOST_IN_TORCH:
        raise NotNative(f"{op.name} is not known in NumPy")
    args, options = (
        mapped(each, (Slot, Weight), lambda ref: torch.from_numpy(find(ref))) for each in (op.args, dict(op.options))
    )
    function: Any = partial(op.function, *args, **options)
    if op.name.endswith("_"):
        emitter.calls.append(function)
        return [find(next(op.refs()))]
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


def _real(*arrays: Any) -> bool:
    """Whether all are arrays of one real dtype."""
    dtypes = {array.dtype if isinstance(array, np.ndarray) else None for array in arrays}
    return dtypes in ({np.dtype(np.float32)}, {np.dtype(np.float64)})


# Element by element -------------------------------------------------------------------------------


def _ufunc(function: Any, *, swapped: bool = False, in_place: bool = False) -> _Emit:
    """One call."""

    def emit(emitter: Emitter, op: Op, *args: Any, **options: Any) -> Array | None:
        out = args[0] if in_place else _new(emitter, op)
        own = [_cast(emitter, arg, out.dtype) if isinstance(arg, np.ndarray) else arg for arg in args]
        numbers = all(isinstance(arg, np.ndarray) or type(arg) in (int, float) for arg in own)
        if options or not numbers or out.dtype.kind != "f" or len(own) != function.nin:
            return None
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


def _clamp(emitter: Emitter, op: Op, x: Array, low: Any = None, high: Any = None, **options: Any) -> Array | None:
    low, high = options.pop("min", low), options.pop("max", high)
    limits = [(np.maximum, low), (np.minimum, high)]
    if options or not _real(x) or not all(type(limit) in (int, float, type(None)) for _, limit in limits):
        return None
    out = x
    for function, limit in limits:
        if limit is not None:
            target = _new(emitter, op) if out is x else out
            emitter.put(function, out, limit, out=target)
            out = target
    return out


def _softplus(emitter: Emitter, op: Op, x: Array, beta: float = 1, threshold: float = 20) -> Array | None:
    if beta != 1 or threshold < 15 or not _real(x):
        return None
    return emitter.to(np.logaddexp, x, 0, like=x)


def _sigmoid(emitter: Emitter, op: Op, x: Array) -> Array | None:
    return _through_tanh(emitter, x) if _real(x) else None


def _through_tanh(emitter: Emitter, x: Array) -> Array:
    out = emitter.to(np.multiply, x, 0.5, like=x)  # which does not overflow
    emitter.put(np.tanh, out, out)
    emitter.put(np.multiply, out, 0.5, out)
    emitter.put(np.add, out, 0.5, out)
    return out


def _silu(emitter: Emitter, op: Op, x: Array, inplace: bool = False) -> Array | None:
    return None if inplace or not _real(x) else emitter.to(np.multiply, x, _through_tanh(emitter, x), like=x)


def _relu(emitter: Emitter, op: Op, x: Array) -> Array | None:
    return emitter.to(np.maximum, x, 0, like=x) if _real(x) else None


def _elu(emitter: Emitter, op: Op, x: Array, alpha: float = 1, inplace: bool = False) -> Array | None:
    if inplace or not _real(x):
        return None
    out = emitter.to(np.minimum, x, 0, like=x)
    emitter.put(np.expm1, out, out)
    if alpha != 1:
        emitter.put(np.multiply, out, alpha, out)
    emitter.put(np.add, out, emitter.to(np.maximum, x, 0, like=x), out)
    return out


def _leaky(emitter: Emitter, op: Op, x: Array, negative_slope: float = 0.01, inplace: bool = False) -> Array | None:
    if inplace or not 0 <= negative_slope <= 1 or not _real(x):
        return None
    out = emitter.to(np.multiply, x, negative_slope, like=x)
    emitter.put(np.maximum, x, out, out=out)
    return out


# Over dimensions ----------------------------------------------------------------------------------


def _linear(emitter: Emitter, op: Op, x: Array, weight: Array, bias: Array | None = None) -> Array | None:
    if not _real(x, weight, *([] if bias is None else [bias])) or not emitter.is_fixed(weight):
        return None
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
        rows = x if x.flags.c_contiguous else _copied(emitter, x, emitter.new(x.shape, x.dtype))
        emitter.put(np.dot, rows.reshape(-1, x.shape[-1]), weight.T, out.reshape(-1, len(weight)))
    if bias is not None:
        emitter.put(np.add, out, bias, out)
    return out


def _layer_norm(
    emitter: Emitter, op: Op, x: Array, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Array | None:
    if len(shape) != 1 or not _real(x):
        return None
    mean, variance = emitter.new((*x.shape[:-1], 1), x.dtype), emitter.new((*x.shape[:-1], 1), x.dtype)
    emitter.put(np.add.reduce, x, -1, None, mean, True)
    emitter.put(np.divide, mean, x.shape[-1], mean)
    out = emitter.to(np.subtract, x, mean, like=x)
    emitter.put(np.add.reduce, emitter.to(np.multiply, out, out, like=x), -1, None, variance, True)
    emitter.put(np.divide, variance, x.shape[-1], variance)
    emitter.put(np.add, variance, eps, variance)
    emitter.put(np.sqrt, variance, variance)
    emitter.put(np.divide, out, variance, out)
    if weight is not None:
        emitter.put(np.multiply, out, weight, out)
    if bias is not None:
        emitter.put(np.add, out, bias, out)
    return out


def _log_softmax(emitter: Emitter, op: Op, x: Array, dim: Any, **options: Any) -> Array | None:
    if dim not in (-1, x.ndim - 1) or options or not _real(x):
        return None
    return emitter.to(np.subtract, x, emitter.log_sum(x), like=x)


def _softmax(emitter: Emitter, op: Op, x: Array, dim: Any, **options: Any) -> Array | None:
    out = _log_softmax(emitter, op, x, dim, **options)
    if out is not None:
        emitter.put(np.exp, out, out)
    return out


def _cat(emitter: Emitter, op: Op, arrays: Sequence[Array], dim: int = 0) -> Array | None:
    out = _new(emitter, op)
    sizes = [array.shape[dim] if array.ndim == out.ndim else -1 for array in arrays]
    if min(sizes, default=-1) < 0:  # torch lets an empty vector pass
        return None
    for array, part in zip(arrays, np.split(out, np.cumsum(sizes)[:-1], dim), strict=True):
        _copied(emitter, array, part)
    return out


_UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide}
IN_NUMPY: dict[str, _Emit] = {
    **{name: _ufunc(getattr(np, name)) for name in ("abs", "cos", "exp", "expm1", "log", "log1p", "sin", "sqrt")},
    **{name: _ufunc(getattr(np, name)) for name in ("maximum", "minimum", "square", "tanh")},
    **{name: _ufunc(function) for name, function in _UFUNCS.items()},
    **{f"{name}_": _ufunc(function, in_place=True) for name, function in _UFUNCS.items()},
    "rsub": _ufunc(np.subtract, swapped=True),
    "rdiv": _ufunc(np.true_divide, swapped=True),
    "neg": _ufunc(np.negative),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "softplus": _softplus,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "relu": _relu,
    "elu": _elu,
    "leaky_relu": _leaky,
    "linear": _linear,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "cat": _cat,
    "float": _to_dtype,
    "double": _to_dtype,
}
