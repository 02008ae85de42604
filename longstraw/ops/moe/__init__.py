"""Routing tokens to experts, and the experts' weighted sum with a backward of bounded memory.

T tokens, k experts a token, N entries (token, expert), E experts, d model width, I inner width of an expert.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.host_sync import counts
from longstraw.ops.moe import cpu, reference
from longstraw.ops.moe.reference import ExpertGradients, Routed


class MoeOps(Protocol):
    """What a backend provides; see ``reference``."""

    def experts_forward(self, x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor) -> Tensor: ...

    def experts_backward(
        self, x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, grads: ExpertGradients
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]: ...


MOE: dict[str, MoeOps] = {"reference": reference, "cpu": cpu, "cuda": reference}


def route(logits: Tensor, bias: Tensor, count: int, *, normalise: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the experts [T, k] of each token and their weights [T, k], from router ``logits`` [T, E].

    Sigmoid scores; ``bias`` [E] takes part in the choice and not in the weights (DeepSeek-V3, arXiv 2412.19437). Of
    experts that tie the first is chosen. ``normalise`` divides the weights by their sum; ``scale`` multiplies them.
    """
    scores = logits.sigmoid()
    chosen = (scores.detach() + bias).sort(stable=True, dim=-1, descending=True).indices[:, :count]
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scale


def route_softmax(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the experts [T, k] of each token and their weights [T, k], from router ``logits`` [T, E].

    The experts with the largest softmax, of those that tie the first; weights are softmax over its sum over the chosen.
    """
    scores = logits.softmax(-1)
    chosen = scores.detach().sort(stable=True, dim=-1, descending=True).indices[:, :count]
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True)


def mix_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, ops: MoeOps = reference
) -> Tensor:
    """Return the weighted sum [T, d] of the ``chosen`` [T, k] experts' outputs for ``x`` [T, d].

    ``weights`` [T, k] at least float32, ``gate_up`` [E, 2I, d], ``down`` [E, d, I]; an expert is
    ``down (silu(gate x) * up x)``.
    """
    order = chosen.flatten().argsort(stable=True)
    token = order // chosen.shape[1]
    routed = Routed(token, weights.flatten()[order], counts(chosen, len(down)))
    return run_experts(x, routed, gate_up, down, ops=ops)


def run_experts(x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, *, ops: MoeOps = reference) -> Tensor:
    """Return [T, d] for entries sorted by expert; arguments as in ``reference.experts_forward``."""
    return _Experts.apply(x, routed.token, routed.weight, gate_up, down, routed.counts, ops)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        token: Tensor,
        weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        counts: list[int],
        ops: MoeOps,
    ) -> Tensor:
        ctx.save_for_backward(x, token, weight, gate_up, down)
        ctx.counts, ctx.ops = counts, ops
        return ops.experts_forward(x, Routed(token, weight, counts), gate_up, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, token, weight, gate_up, down = ctx.saved_tensors
        grads = ExpertGradients(grad, ctx.needs_input_grad[3] or ctx.needs_input_grad[4])
        routed = Routed(token, weight, ctx.counts)
        grad_x, grad_weight, *of_experts = ctx.ops.experts_backward(x, routed, gate_up, down, grads)
        return grad_x, None, grad_weight, *of_experts, None, None
