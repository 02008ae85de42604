"""Log-probability and entropy of chosen tokens from hidden states, in tiles of vocabulary: no full logits.

T positions, d width, V vocabulary. At least float32 inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

POSITION_TILE = 1024
VOCABULARY_TILE = 8192


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability [T] of ``targets`` [T] and the entropy [T] of softmax(hidden weight^T).

    ``hidden`` [T, d], ``weight`` [V, d]. Both results carry gradients for ``hidden`` and ``weight``.
    """
    return _TokenLogprobs.apply(hidden, weight, targets)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the loss seldom reads the entropy
        inner = torch.promote_types(hidden.dtype, torch.float32)
        logprob, entropy, lse = (hidden.new_empty(len(hidden), dtype=inner) for _ in range(3))
        for rows in _tiles(len(hidden), POSITION_TILE):
            x, chosen = hidden[rows].to(inner), targets[rows]
            logit = (x * weight[chosen].to(inner)).sum(-1)
            highest = x.new_full((len(x),), -torch.inf)
            total, weighted = torch.zeros_like(highest), torch.zeros_like(highest)
            for columns in _tiles(len(weight), VOCABULARY_TILE):
                logits = x @ weight[columns].to(inner).T
                raised = torch.maximum(highest, logits.amax(-1))
                decay = (highest - raised).exp()
                mass = (logits - raised[:, None]).exp_()
                total = total * decay + mass.sum(-1)
                weighted = weighted * decay + logits.mul_(mass).sum(-1)
                highest = raised
            lse[rows] = highest + total.log()
            logprob[rows] = logit - lse[rows]
            entropy[rows] = lse[rows] - weighted / total
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Per logit z_j of probability p_j: (1[j = target] - p_j) for the log-probability, -p_j (log p_j + H) for H."""
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        inner = lse.dtype
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(lse)
        grad_hidden = torch.zeros_like(hidden, dtype=inner) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=inner) if ctx.needs_input_grad[1] else None
        for rows in _tiles(len(hidden), POSITION_TILE):
            x, chosen = hidden[rows].to(inner), targets[rows]
            for columns in _tiles(len(weight), VOCABULARY_TILE):
                tile = weight[columns].to(inner)
                logs = (x @ tile.T).sub_(lse[rows, None])
                grad = logs.exp()
                if grad_entropy is None:
                    grad.mul_(-grad_logprob[rows, None])
                else:
                    logs.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(grad_logprob[rows, None])
                    grad.mul_(logs.neg_())
                if grad_hidden is not None:
                    grad_hidden[rows] += grad @ tile
                if grad_weight is not None:
                    grad_weight[columns] += grad.T @ x
            if grad_hidden is not None:
                grad_hidden[rows].addcmul_(weight[chosen].to(inner), grad_logprob[rows, None])
            if grad_weight is not None:
                grad_weight.index_add_(0, chosen, x * grad_logprob[rows, None])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
        )


def _tiles(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
