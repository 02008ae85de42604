"""The gated delta rule by flash-linear-attention's Triton kernels; shapes and meaning as in ``reference``.

Only the inputs are kept; the backward recomputes the chunks' inner products. fla is imported when its kernels are
launched, so this runs on fake tensors without it; memory that the kernels allocate inside is counted there by
``fake_workspace``.

T positions, A key heads, B value heads, K and V widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.delta import reference
from longstraw.ops.fake_workspace import scratch
from longstraw.ops.flops import Flops, OpFlops
from longstraw.ops.kernel_workspace import delta_backward_bytes, delta_forward_bytes
from longstraw.ops.lazy_module import LazyModule

kernels = LazyModule("longstraw.ops.delta.kernels")


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state as ``reference.gated_delta_rule`` does; float64 and no positions go to it."""
    if v.dtype == torch.float64 or len(v) == 0:
        return reference.gated_delta_rule(q, k, v, g, beta, state)
    return _GatedDeltaRule.apply(*(x.contiguous() for x in (q, k, v, g, beta, state)))


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        inside = scratch(inputs[2], delta_forward_bytes(*_sizes(inputs[1], inputs[2])))
        results = gated_delta_forward(*inputs)
        del inside
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        inside = scratch(inputs[2], delta_backward_bytes(*_sizes(inputs[1], inputs[2])))
        results = _gated_delta_backward(*inputs, grad_out.contiguous(), grad_state.contiguous())
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
def _gated_delta_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, grad_out: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the six inputs of the forward."""
    return kernels.backward(q, k, v, g, beta, state, grad_out, grad_state)


@_gated_delta_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, grad_out: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, g, beta, state = (torch.empty_like(x) for x in (q, k, v, g, beta, state))
    return q, k, v, g, beta, state


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> int:
    return len(v) * reference.rule_flops(k.shape[1], v.shape[1], k.shape[2], v.shape[2])


def _backward_flops(*inputs: Tensor) -> int:
    """The forward's products made again, and two for each of them."""
    return 3 * _forward_flops(*inputs)


FLOPS: Flops = {
    torch.ops.longstraw.gated_delta_forward: OpFlops("scan", _forward_flops),
    torch.ops.longstraw.gated_delta_backward: OpFlops("scan", _backward_flops),
}


def _sizes(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return T, A, B, K, V and the bytes of an element."""
    return (*k.shape[:2], v.shape[1], k.shape[2], v.shape[2], v.element_size())
