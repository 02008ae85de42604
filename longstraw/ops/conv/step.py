"""Causal depthwise convolution, then SiLU, for one position of each of n branches. C channels, W taps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv_step(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``silu(conv(x))`` [n, C] and the new tails [n, W-1, C] for ``x`` [n, C], ``weight`` [C, W] and ``tail``.

    As ``reference.causal_conv`` for one position, a branch at a time; at least float32 inside.
    """
    joined = torch.cat([tail.to(x.dtype), x.unsqueeze(1)], 1)
    inner = torch.promote_types(x.dtype, torch.float32)
    out = (joined.to(inner) * weight.T.to(inner)).sum(1)
    return F.silu(out, inplace=True).to(x.dtype), joined[:, 1:]
