"""Root-mean-square norms; at least float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last axis."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(inner), self.weight.shape, self.weight.to(inner), self.eps).to(x.dtype)


class ZeroCentredRMSNorm(nn.Module):
    """``x / rms(x) * (1 + weight)`` over the last axis."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(inner), self.weight.shape, 1 + self.weight.to(inner), self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """``weight * x / rms(x) * silu(gate)`` over the last axis."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        inner = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(inner), self.weight.shape, self.weight.to(inner), self.eps)
        return (normed * F.silu(gate.to(inner))).to(x.dtype)
