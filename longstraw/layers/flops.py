"""Helpers to count the FLOPs of layers: matrix products and operations of the same order; a multiply-add is two."""

from __future__ import annotations

from math import prod

from torch import nn


def weight_flops(*modules: nn.Module) -> int:
    """Return the FLOPs of one position in the weight matrices of ``modules``, low-rank adapters left out."""
    named = (pair for module in modules for pair in module.named_parameters())
    return sum(2 * prod(weight.shape) for name, weight in named if weight.dim() == 2 and "lora_" not in name)


def pairs(start: int, end: int) -> int:
    """Return the number of (query, key) pairs of causal attention for queries [start, end)."""
    return (end * (end + 1) - start * (start + 1)) // 2
