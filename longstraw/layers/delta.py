"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): causal convolution, gated delta rule, gated norm.

T positions, d model width, A key heads, B value heads, K and V their widths, C convolution channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstraw.config.architectures.qwen3_6 import HybridConfig
from longstraw.layers.flops import weight_flops
from longstraw.layers.norm import GatedRMSNorm
from longstraw.layers.op_cases import Case, Draw, differentiated
from longstraw.ops import Ops, segments
from longstraw.ops.conv.step import causal_conv_step
from longstraw.ops.delta.reference import rule_flops
from longstraw.ops.delta.step import gated_delta_step
from longstraw.ops.past import BranchPast
from longstraw.state import DEFAULT_STORAGE, Carried, Past, RowStorage, Tensors


class DepthwiseWeight(nn.Module):
    """Holds the convolution's weight [C, 1, W] under the name and shape of a depthwise ``nn.Conv1d``."""

    def __init__(self, channels: int, taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class GatedDeltaNet(nn.Module):
    """Linear attention with a recurrent state; retains ``recurrent`` [B, K, V] and ``tail`` [W-1, C]."""

    def __init__(self, config: HybridConfig, ops: Ops):
        super().__init__()
        self.ops = ops
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.taps = config.linear_conv_kernel_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths = [keys, keys, values]
        self.channels = [  # (heads, width) of queries, keys and values
            (self.key_heads, self.key_dim),
            (self.key_heads, self.key_dim),
            (self.value_heads, self.value_dim),
        ]
        self.scalars = [(self.value_heads, 1)]
        self.in_proj_qkv = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.conv1d = DepthwiseWeight(sum(self.widths), self.taps)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def new_state(
        self, positions: int, *, grad_from: int | None, dtype: torch.dtype, storage: RowStorage = DEFAULT_STORAGE
    ) -> Carried:
        """Return an empty state; ``positions`` and ``storage`` are ignored, because its size is fixed."""
        weight, share = self.in_proj_qkv.weight, self.ops.context.share
        inner = torch.promote_types(weight.dtype, torch.float32)
        shape = (share(self.value_heads), self.key_dim, self.value_dim)
        recurrent = torch.zeros(shape, dtype=inner, device=weight.device)
        tail = torch.zeros(self.taps - 1, share(sum(self.widths)), dtype=dtype, device=weight.device)
        return Carried({"recurrent": recurrent, "tail": tail}, grad_from=grad_from)

    def forward(self, x: Tensor, past: Past) -> tuple[Tensor, Tensors]:
        """Return the output [T, d] of ``x`` [T, d] and the state after these positions.

        Between the two exchanges this process has every position of the chunk, for its own heads. Of branches
        it has one position each, [n, d], and a state each, [n, B, K, V] and [n, W-1, C]. Segments each start from the
        past's state, and no state is after them all: their update is empty.
        """
        context, chunk = self.ops.context, past.chunk
        convolve, scan = self._operations(past)
        projected = [self.in_proj_qkv(x), self.in_proj_b(x), self.in_proj_a(x)]
        mixed, beta, step = context.to_heads(projected, [self.channels, self.scalars, self.scalars], chunk)
        del projected  # without a graph this frees them
        weight = context.own_heads(self.conv1d.weight.squeeze(1), self.channels)
        mixed, tail = convolve(mixed, weight, past["tail"])
        widths = [context.share(width) for width in self.widths]
        q, k, v = (
            part.unflatten(-1, (-1, width))
            for part, (_, width) in zip(mixed.split(widths, -1), self.channels, strict=True)
        )
        inner = past["recurrent"].dtype
        rate, bias = (context.own_heads(x, self.scalars).to(inner) for x in (self.A_log, self.dt_bias))
        decay = -rate.exp() * F.softplus(step.to(inner) + bias)
        out, recurrent = scan(q, k, v, decay, beta.sigmoid(), past["recurrent"])
        del mixed, q, k, v, decay, beta, step
        out = context.to_positions(out, chunk)
        out = self.norm(out, self.in_proj_z(x).unflatten(-1, (self.value_heads, -1)))
        update = {"recurrent": recurrent, "tail": tail}
        return self.out_proj(out.flatten(1)), {name: x for name, x in update.items() if x is not None}

    def _operations(self, past: Past) -> tuple[segments.Linear, segments.Linear]:
        """Return the convolution and the delta rule for what ``past`` says the positions are."""
        conv, delta, chunk = self.ops.conv, self.ops.delta, past.chunk
        if isinstance(past, BranchPast):
            return causal_conv_step, gated_delta_step
        if chunk is not None and chunk.is_packed:
            return partial(segments.convolve, conv, chunk), partial(segments.scan, delta, chunk)
        return conv, delta

    def update(self, x: Tensor, past: Past) -> Tensors:
        """Return only the state after these positions."""
        return self.forward(x, past)[1]

    def flops(self, start: int, end: int, state_only: bool) -> int:
        """Return the FLOPs of positions [start, end), all of which the state needs."""
        rule = rule_flops(self.key_heads, self.value_heads, self.key_dim, self.value_dim)
        return (end - start) * (weight_flops(self) + rule + 2 * sum(self.widths) * self.taps)

    def attention_flops(self, start: int, end: int) -> int:
        return 0

    def op_cases(self, draw: Draw, positions: int, rows: int) -> list[Case]:
        share, key, value = self.ops.context.share, self.key_dim, self.value_dim
        keys, values = share(self.key_heads), share(self.value_heads)
        scan = {name: draw(positions, keys, key) for name in ("q", "k")} | {"v": draw(positions, values, value)}
        scan["decay"] = -0.05 * draw(positions, values, wide=True).sigmoid()  # slow: the first state reaches the end
        scan["beta"] = draw(positions, values).sigmoid()
        scan["state"] = draw(values, key, value, wide=True)
        channels, taps = share(sum(self.widths)), self.taps
        conv = {"x": draw(positions, channels), "weight": draw(channels, taps), "tail": draw(taps - 1, channels)}
        return [
            _case("gated delta rule", scan, lambda ops: ops.delta, ("output", "final state")),
            _case("causal convolution", conv, lambda ops: ops.conv, ("output", "new tail")),
        ]


def _case(name: str, inputs: Tensors, chosen: Callable[[Ops], Callable[..., Any]], results: tuple[str, str]) -> Case:
    """Return the case of an operation on all ``inputs``, each of which gets a gradient."""

    def run(ops: Ops, tensors: Tensors) -> Tensors:
        def call(leaves: Tensors) -> Tensors:
            return dict(zip(results, chosen(ops)(*leaves.values()), strict=True))

        return differentiated(tensors, tuple(inputs), call)

    return name, inputs, run
