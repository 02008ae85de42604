"""Arithmetic of layers: two operations a multiply-add, of matrix products and what is of their order."""

from __future__ import annotations

from math import prod

from torch import nn


def weight_flops(*modules: nn.Module) -> int:
    """Return the products with the matrices of ``modules``, a position; low-rank adapters are not counted."""
    named = (pair for module in modules for pair in module.named_parameters())
    return sum(2 * prod(weight.shape) for name, weight in named if weight.dim() == 2 and "lora_" not in name)


def pairs(start: int, end: int) -> int:
    """Return how often positions [start, end) see a position, their own included."""
    return (end * (end + 1) - start * (start + 1)) // 2
