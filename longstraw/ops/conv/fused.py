"""The causal convolution by flash-linear-attention's Triton kernels; shapes and meaning as in ``reference``.

fla is imported when its kernels are launched, so this runs on fake tensors without it; memory that the kernels allocate
inside is counted there by ``fake_workspace``.

T positions, C channels, W taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.conv import reference
from longstraw.ops.fake_workspace import scratch
from longstraw.ops.flops import Flops, OpFlops
from longstraw.ops.kernel_workspace import conv_backward_bytes, conv_forward_bytes
from longstraw.ops.lazy_module import LazyModule

kernels = LazyModule("longstraw.ops.conv.kernels")


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
        inside = scratch(x, conv_forward_bytes(*_sizes(x, weight)))
        out = conv_forward(x, weight, before)
        del inside
        return out, torch.cat([before, x[-keep:]])[-keep:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, tail = ctx.saved_tensors
        inside = scratch(x, conv_backward_bytes(len(x), *_sizes(x, weight)))
        results = conv_backward(x, weight, tail, grad.contiguous(), grad_tail)
        del inside
        return results


@torch.library.custom_op("longstraw::conv_forward", mutates_args=(), device_types=("cpu", "cuda"))
def conv_forward(x: Tensor, weight: Tensor, tail: Tensor) -> Tensor:
    """Return ``silu(conv(x))`` [T, C]."""
    return kernels.forward(x, weight, tail)


@conv_forward.register_fake
def _(x: Tensor, weight: Tensor, tail: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("longstraw::conv_backward", mutates_args=(), device_types=("cpu", "cuda"))
def conv_backward(
    x: Tensor, weight: Tensor, tail: Tensor, grad: Tensor, grad_tail: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, ``weight`` and ``tail``."""
    return kernels.backward(x, weight, tail, grad, grad_tail)


@conv_backward.register_fake
def _(x: Tensor, weight: Tensor, tail: Tensor, grad: Tensor, grad_tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(tail)


FLOPS: Flops = {  # the backward makes the forward again
    torch.ops.longstraw.conv_forward: OpFlops("scan", lambda x, weight, *_: 2 * len(x) * weight.numel()),
    torch.ops.longstraw.conv_backward: OpFlops("scan", lambda x, weight, *_: 6 * len(x) * weight.numel()),
}


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Return C, W and the bytes of an element."""
    return *weight.shape, x.element_size()
