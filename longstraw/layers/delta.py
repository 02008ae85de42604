"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): causal convolution, gated delta rule, gated norm.

T positions, d model width, A key heads, B value heads, K and V their widths, C convolution channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstraw.config import Qwen36Config
from longstraw.layers.norm import GatedRMSNorm
from longstraw.ops import Ops
from longstraw.state import Carried, Past, Tensors


class DepthwiseWeight(nn.Module):
    """Holds the convolution's weight [C, 1, W] under the name and shape of a depthwise ``nn.Conv1d``."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class GatedDeltaNet(nn.Module):
    """Linear attention with a recurrent state; retains ``recurrent`` [B, K, V] and ``tail`` [W-1, C]."""

    def __init__(self, config: Qwen36Config, ops: Ops):
        super().__init__()
        self.ops = ops
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.taps = config.linear_conv_kernel_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths = [keys, keys, values]
        self.in_proj_qkv = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.conv1d = DepthwiseWeight(sum(self.widths), self.taps)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def new_state(self, positions: int, *, grad_from: int | None, dtype: torch.dtype) -> Carried:
        """``positions`` does not matter: the state has one size."""
        weight = self.in_proj_qkv.weight
        inner = torch.promote_types(weight.dtype, torch.float32)
        recurrent = torch.zeros(self.value_heads, self.key_dim, self.value_dim, dtype=inner, device=weight.device)
        tail = torch.zeros(self.taps - 1, sum(self.widths), dtype=dtype, device=weight.device)
        return Carried({"recurrent": recurrent, "tail": tail}, grad_from=grad_from)

    def forward(self, x: Tensor, past: Past) -> tuple[Tensor, Tensors]:
        """Return the output [T, d] of ``x`` [T, d] and the state after these positions."""
        mixed, tail = self.ops.conv(self.in_proj_qkv(x), self.conv1d.weight.squeeze(1), past["tail"])
        q, k, v = (
            part.unflatten(-1, (heads, -1))
            for part, heads in zip(
                mixed.split(self.widths, -1), (self.key_heads, self.key_heads, self.value_heads), strict=True
            )
        )
        inner = past["recurrent"].dtype
        decay = -self.A_log.to(inner).exp() * F.softplus(self.in_proj_a(x).to(inner) + self.dt_bias.to(inner))
        out, recurrent = self.ops.delta(q, k, v, decay, self.in_proj_b(x).sigmoid(), past["recurrent"])
        del mixed, q, k, v, decay  # without a graph, nothing else holds them
        out = self.norm(out, self.in_proj_z(x).unflatten(-1, (self.value_heads, -1)))
        return self.out_proj(out.flatten(1)), {"recurrent": recurrent, "tail": tail}

    def update(self, x: Tensor, past: Past) -> Tensors:
        """Return only the state after these positions."""
        return self.forward(x, past)[1]
