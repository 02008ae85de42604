"""Log-sum-exp, target and mean logit of each token, in plain PyTorch and in tiles of vocabulary: no full logits.

T positions, d width, V vocabulary. At least float32 inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

POSITION_TILE = 1024
VOCABULARY_TILE = 8192


def token_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of the logits z = hidden weight^T the target's, the log-sum-exp and the mean under softmax(z); all [T].

    ``hidden`` [T, d], ``weight`` [V, d], ``targets`` [T]. A target outside [0, V) has the logit 0: its row of the
    vocabulary is elsewhere, and parts of a vocabulary merge by these three. All carry gradients for ``hidden`` and
    ``weight``.
    """
    return _TokenLogits.apply(hidden, weight, targets)


class _TokenLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the loss seldom reads the entropy
        inner = torch.promote_types(hidden.dtype, torch.float32)
        logit, lse, mean = (hidden.new_empty(len(hidden), dtype=inner) for _ in range(3))
        for rows in _tiles(len(hidden), POSITION_TILE):
            x = hidden[rows].to(inner)
            chosen, here = _within(targets[rows], len(weight))
            logit[rows] = (x * weight[chosen].to(inner)).sum(-1).mul_(here)
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
            mean[rows] = weighted / total
        ctx.save_for_backward(hidden, weight, targets, lse, mean)
        return logit, lse, mean

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logit: Tensor | None, grad_lse: Tensor | None, grad_mean: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Per logit z_j of probability p_j: the logit has 1[j = target], the lse p_j, the mean p_j (1 + z_j - mean)."""
        hidden, weight, targets, lse, mean = ctx.saved_tensors
        inner = lse.dtype
        if grad_lse is None:
            grad_lse = torch.zeros_like(lse)
        grad_hidden = torch.zeros_like(hidden, dtype=inner) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=inner) if ctx.needs_input_grad[1] else None
        for rows in _tiles(len(hidden), POSITION_TILE):
            x = hidden[rows].to(inner)
            for columns in _tiles(len(weight), VOCABULARY_TILE):
                tile = weight[columns].to(inner)
                logits = x @ tile.T
                if grad_mean is None:
                    grad = logits.sub_(lse[rows, None]).exp_().mul_(grad_lse[rows, None])
                else:
                    grad = (logits - lse[rows, None]).exp_()
                    logits.sub_(mean[rows, None]).add_(1).mul_(grad_mean[rows, None]).add_(grad_lse[rows, None])
                    grad.mul_(logits)
                if grad_hidden is not None:
                    grad_hidden[rows] += grad @ tile
                if grad_weight is not None:
                    grad_weight[columns] += grad.T @ x
            if grad_logit is not None:
                chosen, here = _within(targets[rows], len(weight))
                share = (grad_logit[rows] * here)[:, None]
                if grad_hidden is not None:
                    grad_hidden[rows].addcmul_(weight[chosen].to(inner), share)
                if grad_weight is not None:
                    grad_weight.index_put_((chosen,), x * share, accumulate=True)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
        )


def _within(targets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the targets, 0 for those outside [0, size), and which are inside."""
    here = (targets >= 0) & (targets < size)
    return targets * here, here


def _tiles(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
