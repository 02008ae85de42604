"""The gated delta rule by flash-linear-attention's Triton kernels; shapes and meaning as in ``reference``.

The backward evaluates the chunks' inner products anew: only the inputs are kept. fla is imported when its kernels are
launched: on fake tensors all of this runs without it, and what they allocate inside is stood for by scratch.

T positions, A key heads, B value heads, K and V widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.deferred import DeferredModule
from longstraw.ops.delta import reference
from longstraw.ops.scratch import scratch

INNER_CHUNK = 64
kernels = DeferredModule("longstraw.ops.delta.kernels")


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state as ``reference.gated_delta_rule`` does; float64 and no positions go to it."""
    if v.dtype == torch.float64 or len(v) == 0:
        return reference.gated_delta_rule(q, k, v, g, beta, state)
    return _GatedDeltaRule.apply(*(x.contiguous() for x in (q, k, v, g, beta, state)))


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        inside = scratch(inputs[2], _forward_bytes(*_sizes(inputs[1], inputs[2])))
        results = gated_delta_forward(*inputs)
        del inside
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        inside = scratch(inputs[2], _backward_bytes(*_sizes(inputs[1], inputs[2])))
        results = gated_delta_backward(*inputs, grad_out.contiguous(), grad_state.contiguous())
        del inside
        return results


@torch.library.custom_op("longstraw::gated_delta_forward", mutates_args=(), device_types=("cpu", "cuda"))
def gated_delta_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, B, V] and the final state [B, K, V]."""
    return kernels.forward(q, k, v, g, beta, state)


@gated_delta_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(state)


@torch.library.custom_op("longstraw::gated_delta_backward", mutates_args=(), device_types=("cpu", "cuda"))
def gated_delta_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, grad_out: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the six inputs of the forward."""
    return kernels.backward(q, k, v, g, beta, state, grad_out, grad_state)


@gated_delta_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, grad_out: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, g, beta, state = (torch.empty_like(x) for x in (q, k, v, g, beta, state))
    return q, k, v, g, beta, state


def _sizes(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return T, A, B, K, V and the bytes of an element."""
    return (*k.shape[:2], v.shape[1], k.shape[2], v.shape[2], v.element_size())


def _kept_bytes(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Normed queries and keys with their norms, summed decay, inverse, w, u, new values, and the chunks' states."""
    normed = 2 * count * keys * (key * size + 4)
    rows = count * values * (4 + (INNER_CHUNK + key + 2 * value) * size)
    return normed + rows + -(-count // INNER_CHUNK) * values * key * value * size


def _forward_bytes(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Return what the forward allocates beside its results: all of it is alive when the outputs are made."""
    return _kept_bytes(count, keys, values, key, value, size) - count * keys * 4  # the queries' norms are gone by then


def _backward_bytes(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Return what is alive beside the results at the backward's peak: where the gradients of w and u are taken up."""
    states = -(-count // INNER_CHUNK) * values * key * value * size
    rows = count * values * ((2 * key + value) * size + 4)
    summed = count * keys * key * size if keys != values else 0
    return _kept_bytes(count, keys, values, key, value, size) + states + rows + summed
