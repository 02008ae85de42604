"""A linear map of bfloat16 numbers in float32, a tile of the weight at a time, for processors.

Without bfloat16 arithmetic of its own (before AVX-512) a processor forms such a product four times slower than in
float32, and a hundred times slower where the weight is not transposed, as in every backward. Products of bfloat16
numbers are exact in float32; sums are rounded once, at the end.

T positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

WEIGHT_TILE = 2**22  # elements of the weight cast to float32 at a time


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` [..., I] times the transpose of ``weight`` [O, I], both in bfloat16; gradients for both."""
    return _Linear.apply(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        wide = x.flatten(0, -2).float()
        out = x.new_empty(len(wide), len(weight))
        for rows in _tiles(weight):
            out[:, rows] = wide @ weight[rows].float().T
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        grad_x = flat.new_zeros(len(flat), weight.shape[1], dtype=torch.float32) if ctx.needs_input_grad[0] else None
        wide = None if x is None else x.flatten(0, -2).float()
        grad_weight = None if wide is None else torch.empty_like(weight)
        for rows in _tiles(weight):
            given = flat[:, rows].float()
            if grad_x is not None:
                grad_x.addmm_(given, weight[rows].float())
            if wide is not None and grad_weight is not None:
                grad_weight[rows] = (given.T @ wide).to(weight.dtype)
        if grad_x is None:
            return None, grad_weight
        return grad_x.to(grad.dtype).view(*grad.shape[:-1], -1), grad_weight


def _tiles(weight: Tensor) -> Iterator[slice]:
    rows = max(WEIGHT_TILE // weight.shape[1], 1)
    return (slice(start, min(start + rows, len(weight))) for start in range(0, len(weight), rows))
