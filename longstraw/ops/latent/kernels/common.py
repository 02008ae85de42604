"""What both files of kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
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


def check(q: Tensor) -> None:
    """Raise TypeError unless ``q`` has a dtype that the kernels take."""
    if q.dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise TypeError(f"the CUDA kernels of latent attention take queries in {names}, not {q.dtype}")


def inner_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def rowwise(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x`` as the kernels read it: its last dimension contiguous, in ``dtype`` (None: its own).

    Retained rows may be kept in another dtype than queries have; then a layer's are copied.
    """
    x = x if dtype is None else x.to(dtype)
    return x if x.stride(-1) == 1 or not x.numel() else x.contiguous()


def power(size: int) -> int:
    """Round up to a power of two that tensor cores take."""
    return max(triton.next_power_of_2(size), 16)
