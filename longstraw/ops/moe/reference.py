"""A mixture of SwiGLU experts over tokens sorted by expert, in plain PyTorch.

T tokens, N = T x chosen experts (another number with expert parallelism), E experts, d model width, I inner width of an
expert. Sums in at least float32; matrix products in the dtype of their inputs, or in ``inner``, into which
the weights of one expert at a time are cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Routed(NamedTuple):
    """Entries (token, expert), sorted by expert: which token each is, its weight, and how many each expert has."""

    token: Tensor  # [N]
    weight: Tensor  # [N], at least float32
    counts: list[int]  # [E]


class ExpertGradients(NamedTuple):
    """What the backward is given: the output's gradient [T, d], and whether the experts' weights get one."""

    grad: Tensor
    trainable: bool


def experts_forward(
    x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, *, inner: torch.dtype | None = None
) -> Tensor:
    """Return [T, d]: for each token of ``x`` [T, d] the weighted sum of the experts that it goes to.

    ``gate_up`` [E, 2I, d], ``down`` [E, d, I].
    """
    token, weight, counts = routed
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    inner = inner or x.dtype
    for expert, entries in _segments(counts):
        tokens = token[entries]
        gate, up = (x[tokens].to(inner) @ gate_up[expert].to(inner).T).chunk(2, -1)
        result = (F.silu(gate) * up) @ down[expert].to(inner).T
        out.index_add_(0, tokens, result.to(out.dtype) * weight[entries, None])
    return out.to(x.dtype)


def experts_backward(
    x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, grads: ExpertGradients, inner: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of ``x``, of the entries' weights and, if asked for, of ``gate_up`` and ``down``.

    Activations inside an expert are recomputed for its own tokens, so they never exist for all tokens at once.
    """
    token, weight, counts = routed
    grad, trainable = grads
    grad_x = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    grad_weight = torch.empty_like(weight)
    grad_gate_up = torch.zeros_like(gate_up) if trainable else None
    grad_down = torch.zeros_like(down) if trainable else None
    inner = inner or x.dtype
    for expert, entries in _segments(counts):
        tokens = token[entries]
        given, share = x[tokens].to(inner), weight[entries, None].to(inner)
        gate, up = (given @ gate_up[expert].to(inner).T).chunk(2, -1)
        product, grad_out = F.silu(gate) * up, grad[tokens].to(inner)
        grad_product = grad_out @ down[expert].to(inner)
        grad_weight[entries] = (grad_product.to(weight.dtype) * product).sum(-1)
        grad_product *= share
        if grad_down is not None:
            grad_down[expert] = (grad_out * share).T @ product
        slope = gate.sigmoid()
        grad_gate = grad_product * up * slope * (1 + gate * (1 - slope))
        grad_both = torch.cat([grad_gate, grad_product * F.silu(gate)], -1)
        if grad_gate_up is not None:
            grad_gate_up[expert] = grad_both.T @ given
        grad_x.index_add_(0, tokens, (grad_both @ gate_up[expert].to(inner)).to(grad_x.dtype))
    return grad_x.to(x.dtype), grad_weight, grad_gate_up, grad_down


def _segments(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert that got tokens with the entries that are its own."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
