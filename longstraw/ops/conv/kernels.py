"""The causal convolution by flash-linear-attention's Triton kernels; shapes and meaning as in ``reference``.

fla's state has W columns of which the first is padding: [1, C, W] for a tail [W-1, C].
"""

from __future__ import annotations

from typing import Any

import torch
from fla.modules.causal_conv1d.ops import causal_conv1d_bwd, causal_conv1d_fwd
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longstraw.ops.conv import reference
from longstraw.ops.scratch import scratch

BLOCK = 64  # positions, of which the gradient of the weight is summed first


def causal_conv(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``silu(conv(x))`` and the new tail as ``reference.causal_conv`` does; float64 and no rows go to it."""
    if x.dtype == torch.float64 or len(x) == 0:
        return reference.causal_conv(x, weight, tail)
    return _CausalConv.apply(x.contiguous(), weight.contiguous(), tail)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        before = tail.to(x.dtype)
        ctx.save_for_backward(x, weight, before)
        keep = len(tail)
        return conv_forward(x, weight, before), torch.cat([before, x[-keep:]])[-keep:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, tail = ctx.saved_tensors
        blocks = -(-len(x) // BLOCK)
        inside = scratch(x, x.numel() * x.element_size() + blocks * weight.numel() * 4)  # the output, weights' sums
        results = conv_backward(x, weight, tail, grad.contiguous(), grad_tail)
        del inside
        return results


@torch.library.custom_op("longstraw::conv_forward", mutates_args=(), device_types=("cpu", "cuda"))
def conv_forward(x: Tensor, weight: Tensor, tail: Tensor) -> Tensor:
    """Return ``silu(conv(x))`` [T, C]."""
    return causal_conv1d_fwd(
        x=x[None], weight=weight, bias=None, residual=None, initial_state=_state(tail), activation="silu"
    )[0][0]


@conv_forward.register_fake
def _(x: Tensor, weight: Tensor, tail: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("longstraw::conv_backward", mutates_args=(), device_types=("cpu", "cuda"))
def conv_backward(
    x: Tensor, weight: Tensor, tail: Tensor, grad: Tensor, grad_tail: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, ``weight`` and ``tail``."""
    grad_x, grad_weight, _, _, grad_state = causal_conv1d_bwd(
        x=x[None],
        dy=grad[None],
        dht=_state(grad_tail),
        weight=weight,
        initial_state=_state(tail),
        activation="silu",
    )
    return grad_x[0], grad_weight, grad_state[0, :, 1:].T.contiguous()


@conv_backward.register_fake
def _(x: Tensor, weight: Tensor, tail: Tensor, grad: Tensor, grad_tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(tail)


def _state(tail: Tensor) -> Tensor:
    return F.pad(tail.T, (1, 0))[None].contiguous()
