"""Log-probability and entropy of chosen tokens on CUDA, without storing the logits.

A Triton kernel of the forward computes tiles of logits and reduces them at once. The backward recomputes the logits'
gradient for one tile of vocabulary at a time, followed by two plain matrix products.

T positions, d width, V vocabulary. float64 goes through the reference. Triton is imported when a kernel is launched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.flops import Flops, OpFlops
from longstraw.ops.lazy_module import LazyModule
from longstraw.ops.logprob import reference

SPLIT = 4096  # columns that one program of the forward reduces
GRADIENT_TILE = 8192  # columns whose gradient exists at a time
kernels = LazyModule("longstraw.ops.logprob.kernels")


def token_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``reference.token_logits`` does, in float32."""
    if hidden.dtype == torch.float64:
        return reference.token_logits(hidden, weight, targets)
    return _TokenLogits.apply(hidden, weight, targets)


class _TokenLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the loss seldom reads the entropy
        hidden, weight = _rows_contiguous(hidden), _rows_contiguous(weight).to(hidden.dtype)
        parts = hidden.new_empty(4, -(-len(weight) // SPLIT), len(hidden), dtype=torch.float32)
        reduce_logits(hidden, weight, targets, parts, SPLIT)
        highest, total, weighted, chosen = parts
        shares = (highest - highest.amax(0)).exp_()
        total = (total * shares).sum(0)
        lse, mean = highest.amax(0) + total.log(), (weighted * shares).sum(0) / total
        ctx.save_for_backward(hidden, weight, targets, lse, mean)
        return chosen.sum(0), lse, mean

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logit: Tensor | None, grad_lse: Tensor | None, grad_mean: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets, lse, mean = ctx.saved_tensors
        grads = [torch.zeros_like(lse) if x is None else x.contiguous() for x in (grad_logit, grad_lse)]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        tile = hidden.new_empty(len(hidden), min(GRADIENT_TILE, len(weight)))
        for start in range(0, len(weight), GRADIENT_TILE):
            rows = weight[start : start + GRADIENT_TILE]
            grad = tile[:, : len(rows)]
            _logit_gradients(hidden, rows, targets, lse, mean, *grads, grad_mean, start, grad)
            if grad_hidden is not None:
                grad_hidden += grad @ rows
            if grad_weight is not None:
                torch.mm(grad.T, hidden, out=grad_weight[start : start + GRADIENT_TILE])
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None


@torch.library.custom_op("longstraw::reduce_logits", mutates_args=("parts",), device_types=("cpu", "cuda"))
def reduce_logits(hidden: Tensor, weight: Tensor, targets: Tensor, parts: Tensor, split: int) -> None:
    """Fill ``parts`` [4, V / split, T] with, of each split: highest logit, sum of exp(logit - highest), sum of logits
    so weighted, and the target's logit or 0."""
    if len(hidden):
        kernels.reduce_logits(hidden, weight, targets, parts, split)


@reduce_logits.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, parts: Tensor, split: int) -> None:
    return None


@torch.library.custom_op("longstraw::logit_gradients", mutates_args=("out",), device_types=("cpu", "cuda"))
def _logit_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    mean: Tensor,
    grad_logit: Tensor,
    grad_lse: Tensor,
    grad_mean: Tensor | None,
    start: int,
    out: Tensor,
) -> None:
    """Fill ``out`` [T, v] with the gradient of the logits of ``weight`` [v, d], the vocabulary's rows from ``start``.

    ``lse`` and ``mean`` [T] are those of the whole vocabulary, and so are the gradients [T] of its three results.
    """
    if len(hidden):
        kernels.logit_gradients(hidden, weight, targets, lse, mean, grad_logit, grad_lse, grad_mean, start, out)


@_logit_gradients.register_fake
def _(*_: object) -> None:
    return None


def _logits_flops(hidden: Tensor, weight: Tensor, *_: object) -> int:
    return 2 * hidden.numel() * len(weight)


FLOPS: Flops = {
    torch.ops.longstraw.reduce_logits: OpFlops("products", _logits_flops),
    torch.ops.longstraw.logit_gradients: OpFlops("products", _logits_flops),
}


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
