"""Rotary position embedding, half-split (dimension i is rotated with i + width/2) or in pairs (2i with 2i + 1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longstraw.config.architectures.base import RopeScaling

UNSCALED = RopeScaling()


def rotary_angles(
    positions: Tensor, width: int, theta: float, *, dtype: torch.dtype, scaling: RopeScaling = UNSCALED
) -> Tensor:
    """Return the angles [T, width/2] of integer ``positions`` [T], formed in ``dtype``.

    Float32 is what transformers does; at two million positions its angles are off by 0.07 rad, float64's are not.
    """
    return torch.outer(positions.to(dtype), _frequencies(width, theta, scaling, dtype, positions.device))


def rotate(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    """Rotate the first dimensions of ``x`` [T, H, D] by ``angles`` [T, width/2], times ``scale``; the others stay."""
    half = angles.shape[-1]
    cos, sin = ((f * scale).to(x.dtype).unsqueeze(1) for f in (angles.cos(), angles.sin()))
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def rotate_pairs(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    """Rotate dimension 2i with 2i + 1; the result is half-split, as in transformers.

    Queries and keys are permuted alike, so their products do not change.
    """
    width = 2 * angles.shape[-1]
    pairs = x[..., :width].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(torch.cat([pairs, x[..., width:]], -1), angles, scale)


def _frequencies(width: int, theta: float, scaling: RopeScaling, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the angle per position [width/2]."""
    dimensions = torch.arange(0, width, 2, dtype=torch.int64, device=device).to(dtype)
    period = theta ** (dimensions / width)
    if scaling.factor == 1:
        return 1.0 / period
    if scaling.rope_type == "linear":
        return 1.0 / period / scaling.factor
    if scaling.rope_type == "llama3":
        return _llama3(1.0 / period, scaling)
    return _yarn(dimensions, period, theta, scaling)


def _yarn(dimensions: Tensor, period: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Slow frequencies down as Peng et al. 2023 (arXiv 2309.00071) do.

    Dimensions that turn more than ``beta_fast`` times over the native length stay, those that turn less than
    ``beta_slow`` times are slowed down by the factor, with a linear ramp between.
    """
    native, width = scaling.original_max_position_embeddings, 2 * len(dimensions)
    assert native is not None

    def turning(turns: float) -> float:
        """The dimension that turns this often over the native length."""
        return width * math.log(native / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((dimensions / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
    return 1.0 / (scaling.factor * period) * ramp + 1.0 / period * (1 - ramp)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow frequencies down as Llama 3.1 does.

    Those with at least ``high_freq_factor`` wavelengths in the native length stay, those with at most
    ``low_freq_factor`` are divided by the factor, with a linear ramp between.
    """
    native = scaling.original_max_position_embeddings
    assert native is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = native / (2 * math.pi / plain)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * plain / scaling.factor + ramp * plain
