"""One layer of a GRU over packed sequences, with the derivative written by hand.

With ``x_t``, ``h`` the input and the state, sigmoid ``s`` and the weights of ``torch.nn.GRU``::

    r, z = s(W_r x_t + b_r + U_r h + c_r), s(W_z x_t + b_z + U_z h + c_z)
    n = tanh(W_n x_t + b_n + r * (U_n h + c_n))          h' = n + z * (h - n)

All products with ``W`` are one matrix product, and so are the gradients of all weights; what remains in the loop over
time is the product with ``U`` and a few element-wise operations. For ``g = dL/dh'``, factors that do not depend on it
are computed for all steps at once::

    dL/d(n's argument) = g (1 - z)(1 - n^2)              dL/d(U_n h + c_n) = g (1 - z)(1 - n^2) r
    dL/d(z's argument) = g (h - n) z (1 - z)             dL/dh = g z + U^T dL/d(U h + c)
    dL/d(r's argument) = g (1 - z)(1 - n^2)(U_n h + c_n) r (1 - r)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gru_layer(x: Tensor, sizes: list[int], h: Tensor, weights: list[Tensor]) -> Tensor:
    """States after each step.

    Args:
        x: ``[N, F]`` in time-major order, the longest sequences first: ``sizes[0]`` rows of step 0, ``sizes[1]`` of 1…
        sizes: never grow; their sum is ``N``.
        h: first states, ``[sizes[0], H]``.
        weights: ``w_ih [3H, F]``, ``w_hh [3H, H]`` and, where there are any, the biases ``[3H]``.

    Returns:
        ``[N, H]``, ordered as ``x``.
    """
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:] if len(weights) > 2 else (None, w_hh.new_zeros(w_hh.shape[0]))
    given = torch.nn.functional.linear(x, w_ih, b_ih)
    states: Tensor = _GRULayer.apply(given, h, w_hh, b_hh, sizes)  # type: ignore[no-untyped-call]
    return states


class _GRULayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, first: Tensor, w_hh: Tensor, b_hh: Tensor, sizes: list[int]) -> Tensor:
        rows, width = given.shape[0], w_hh.shape[1]
        gates = given.clone()  # becomes r, z, n
        carried_n = given.new_empty(rows, width)  # U_n h + c_n
        states = given.new_empty(rows, width)
        transposed = w_hh.t()
        h = first
        for gate, carry, out in zip(gates.split(sizes), carried_n.split(sizes), states.split(sizes), strict=True):
            h = h[: gate.shape[0]]
            carried = torch.addmm(b_hh, h, transposed)
            carry.copy_(carried[:, 2 * width :])
            reset_update, new = gate[:, : 2 * width], gate[:, 2 * width :]
            reset_update.add_(carried[:, : 2 * width]).sigmoid_()
            new.addcmul_(gate[:, :width], carry).tanh_()
            h = torch.lerp(new, h, gate[:, width : 2 * width], out=out)
        ctx.save_for_backward(gates, carried_n, states, first, w_hh)
        ctx.sizes = sizes
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        gates, carried_n, states, first, w_hh = ctx.saved_tensors
        sizes = ctx.sizes
        rows, width = states.shape
        befores = states.split(sizes)
        before = torch.cat([first, *(b[:n] for b, n in zip(befores, sizes[1:], strict=False))])
        reset, update, new = gates.view(rows, 3, width).unbind(1)
        factor_n = (1 - update).mul_(1 - new * new)
        arguments = gates.new_empty(rows, 3, width)  # factors of g, then dL/d(U h + c)
        torch.mul(factor_n * carried_n, reset * (1 - reset), out=arguments[:, 0])
        torch.mul(before - new, update * (1 - update), out=arguments[:, 1])
        torch.mul(factor_n, reset, out=arguments[:, 2])
        grads = grad_states.clone()
        grad_h = first.new_empty(0, width)
        steps = zip(grads.split(sizes), arguments.split(sizes), update.split(sizes), strict=True)
        for grad, argument, keep in reversed(list(steps)):
            grad[: grad_h.shape[0]].add_(grad_h)
            argument.mul_(grad.unsqueeze(1))
            grad_h = torch.addmm(grad * keep, argument.flatten(1), w_hh)
        grad_carried = arguments.flatten(1)
        grad_given = grad_carried.clone()
        torch.mul(grads, factor_n, out=grad_given[:, 2 * width :])
        return grad_given, grad_h, grad_carried.t() @ before, grad_carried.sum(0), None
