"""Causal depthwise convolution with a tail, then SiLU. T positions, C channels, W taps; at least float32 inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def causal_conv(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``silu(conv(x))`` [T, C] and the new tail [W-1, C], the last inputs.

    ``x`` [T, C] may be shorter than the tail; ``weight`` [C, W], its last tap on the current position; ``tail``
    [W-1, C] the inputs before ``x``. Gradients for all three.
    """
    return _CausalConv.apply(x, weight, tail)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([tail.to(x.dtype), x])
        ctx.save_for_backward(joined, weight)
        return F.silu(_convolve(joined, weight), inplace=True).to(x.dtype), joined[len(x) :].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joined, weight = ctx.saved_tensors
        count, taps = len(grad), weight.shape[1]
        before = _convolve(joined, weight)
        gate = before.sigmoid()
        # d silu = s + x s (1 - s)
        grad = grad * before.mul_(1 - gate).add_(1).mul_(gate)
        grad_joined = grad.new_zeros(joined.shape)
        grad_joined[count:] = grad_tail
        grad_weight = grad.new_empty(weight.shape)
        for tap in range(taps):
            grad_joined[tap : tap + count].addcmul_(grad, weight[:, tap].to(grad.dtype))
            grad_weight[:, tap] = (grad * joined[tap : tap + count]).sum(0)
        grad_joined = grad_joined.to(joined.dtype)
        # the tail lives on as state gradient: a view would keep all of grad_joined alive
        return grad_joined[taps - 1 :], grad_weight.to(weight.dtype), grad_joined[: taps - 1].clone()


def _convolve(joined: Tensor, weight: Tensor) -> Tensor:
    inner = torch.promote_types(joined.dtype, torch.float32)
    count = len(joined) - weight.shape[1] + 1
    out = torch.zeros(count, joined.shape[1], dtype=inner, device=joined.device)
    for tap in range(weight.shape[1]):
        out.addcmul_(joined[tap : tap + count].to(inner), weight[:, tap].to(inner))
    return out
