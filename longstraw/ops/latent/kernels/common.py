"""Masked loads and stores that both files of kernels use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

INNER = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def load(pointers, rows, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load [rows, BLOCK], 0 outside. Where blocks are whole no column is checked, so that loads stay wide."""
    mask = rows[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store(pointers, values, rows, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store [rows, BLOCK] in the dtype of what is stored to."""
    mask = rows[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)
