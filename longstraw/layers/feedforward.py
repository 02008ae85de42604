"""Feed-forward layers: SwiGLU, and a mixture of SwiGLU experts with its router.

T tokens, d model width, E experts, I inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstraw.config.architectures import Glm52Config, Qwen36MoeConfig
from longstraw.layers.flops import weight_flops
from longstraw.ops import Ops
from longstraw.ops.moe import route, route_softmax


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, inner: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def flops(self, count: int) -> int:
        """Return the FLOPs of ``count`` tokens."""
        return count * weight_flops(self)


class SoftmaxRouter(nn.Module):
    """Choose experts by the softmax of their scores."""

    def __init__(self, config: Qwen36MoeConfig):
        super().__init__()
        self.count = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts of ``x`` [T, d] and their weights, at least float32; both [T, experts a token]."""
        inner = torch.promote_types(x.dtype, torch.float32)
        return route_softmax(F.linear(x.to(inner), self.weight.to(inner)), self.count)


class Router(nn.Module):
    """Choose experts by score; ``e_score_correction_bias`` affects only the choice and is a buffer."""

    e_score_correction_bias: Tensor

    def __init__(self, config: Glm52Config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts of ``x`` [T, d] and their weights, at least float32; both [T, experts a token]."""
        config = self.config
        inner = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(inner), self.weight.to(inner))
        return route(
            logits,
            self.e_score_correction_bias,
            config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Keep the bias in float32 when the model is cast: rounded to bfloat16 it would choose other experts."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if self.e_score_correction_bias.dtype != bias.dtype:
            self.e_score_correction_bias = bias.to(self.e_score_correction_bias.device)
        return self


class Experts(nn.Module):
    """The experts' weights, fused as in transformers: ``gate_up_proj`` [E, 2I, d] and ``down_proj`` [E, d, I]."""

    def __init__(self, config: Glm52Config | Qwen36MoeConfig, ops: Ops):
        super().__init__()
        self.ops = ops
        number, width, inner = config.experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(number, width, inner))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.ops.context.mix_experts(x, chosen, weights, self.gate_up_proj, self.down_proj)

    def flops(self, entries: int) -> int:
        """Return the FLOPs of so many pairs of token and expert."""
        return 2 * entries * sum(prod(stack.shape[1:]) for stack in (self.gate_up_proj, self.down_proj))


class MixtureOfExperts(nn.Module):
    """A few routed experts a token and one shared expert for every token."""

    def __init__(self, config: Glm52Config, ops: Ops):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, ops)
        self.shared_experts = SwiGLU(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)

    def flops(self, count: int) -> int:
        """Return the FLOPs of ``count`` tokens, with as many experts as a token is routed to."""
        return count * weight_flops(self) + self.experts.flops(count * self.gate.config.num_experts_per_tok)


class GatedMixture(nn.Module):
    """A few routed experts a token, and one shared expert whose output each token multiplies by a sigmoid."""

    def __init__(self, config: Qwen36MoeConfig, ops: Ops):
        super().__init__()
        self.gate = SoftmaxRouter(config)
        self.experts = Experts(config, ops)
        self.shared_expert = SwiGLU(config.hidden_size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x)) + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)

    def flops(self, count: int) -> int:
        """Return the FLOPs of ``count`` tokens, with as many experts as a token is routed to."""
        return count * weight_flops(self) + self.experts.flops(count * self.gate.count)
