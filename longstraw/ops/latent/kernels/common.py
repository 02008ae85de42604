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


def check(*tensors: Tensor) -> None:
    """Raise TypeError unless all have one dtype that the kernels take."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise TypeError(
            f"the CUDA kernels of latent attention take one of {', '.join(map(str, DTYPES))} for all tensors, not "
            f"{', '.join(sorted(map(str, dtypes)))}; backend=reference takes any"
        )


def inner_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def rowwise(x: Tensor) -> Tensor:
    """Return ``x`` with its last dimension contiguous, as the kernels read it."""
    return x if x.stride(-1) == 1 or not x.numel() else x.contiguous()


def power(size: int) -> int:
    """Round up to a power of two that tensor cores take."""
    return max(triton.next_power_of_2(size), 16)
