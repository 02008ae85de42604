"""Rotary position embedding, half-split: dimension i turns with i + width/2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(
    start: int, count: int, width: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the angles [T, width/2] of positions ``start`` to ``start + count``, formed in ``dtype``.

    Float32 is what transformers does; at two million positions its angles are off by 0.07 rad, float64's are not.
    """
    powers = torch.arange(0, width, 2, dtype=torch.int64, device=device).to(dtype) / width
    positions = torch.arange(start, start + count, device=device).to(dtype)
    return torch.outer(positions, 1.0 / theta**powers)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the first dimensions of ``x`` [T, H, D] by ``angles`` [T, width/2]; the others pass."""
    half = angles.shape[-1]
    cos, sin = (f.to(x.dtype).unsqueeze(1) for f in (angles.cos(), angles.sin()))
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
