"""Embedding and head sharded by rows of the vocabulary, which are never gathered; hidden states are sent instead.

n positions of a chunk, t of them here, d width, V rows of the vocabulary here of those of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from longstraw.ops.logprob import TokenLogits, all_logits
from longstraw.parallel.collectives import Group, labelled


def embed(tokens: Tensor, weight: Tensor, group: Group) -> Tensor:
    """Return the rows [t, d] for this rank's part of ``tokens`` [n], of a table spread over ranks."""
    rows, first = own_rows(weight, group)
    return _Embedding.apply(tokens, rows, first, group)


def vocabulary_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, group: Group, logits: TokenLogits
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy [n] of ``targets`` [n], alike on all ranks, after ``hidden`` [t, d].

    ``weight`` is the sharded head, ``logits`` a backend's function, which is called with this rank's rows.
    """
    rows, first = own_rows(weight, group)
    everyones = _GatherHidden.apply(hidden, group, len(targets))
    logit, lse, mean = logits(everyones, rows, targets - first)
    logit, lses, means = _Stack.apply(group, logit, lse, mean)
    whole = lses.logsumexp(0)
    mean = ((lses - whole).exp() * means).sum(0)
    return logit.sum(0) - whole, whole - mean


def vocabulary_logits(hidden: Tensor, weight: Tensor, count: int, group: Group) -> Tensor:
    """Return the logits [t, V W] of this rank's of ``count`` positions, after ``hidden`` [t, d]; without a graph.

    Every rank computes those of its own rows for all positions and sends each position's to its owner: a rank sends
    and gets count V numbers, in at least float32.
    """
    rows, _ = own_rows(weight, group)
    longest = -(-len(weight) // group.size)  # rows of the first ranks; the last ones may have fewer
    with labelled("vocabulary"):
        own = all_logits(group.all_gather(hidden, count), rows)
        columns = group.gather_positions(F.pad(own, (0, longest - len(rows))), count)
    return columns.flatten(1)[:, : len(weight)]


def own_rows(weight: Tensor, group: Group) -> tuple[Tensor, int]:
    """Return the rows of ``weight`` that are here and the index of the first: as ``torch.chunk`` cuts them."""
    if not isinstance(weight, DTensor):
        raise TypeError("a vocabulary that is spread over ranks is a DTensor; see parallel.parallelize.parallelize")
    return weight.to_local(), min(-(-len(weight) // group.size) * group.rank, len(weight))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first: int, group: Group) -> Tensor:
        here = (tokens >= first) & (tokens < first + len(weight))
        index = (tokens - first) * here
        rows = F.embedding(index, weight).mul_(here.unsqueeze(-1))
        ctx.save_for_backward(index, here)
        ctx.shape, ctx.group, ctx.count = weight.shape, group, len(tokens)
        with labelled("vocabulary"):
            return group.reduce_scatter(rows, len(tokens))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        index, here = ctx.saved_tensors
        with labelled("vocabulary"):
            everyones = ctx.group.all_gather(grad, ctx.count)
        inner = torch.promote_types(grad.dtype, torch.float32)
        table = everyones.new_zeros(ctx.shape, dtype=inner)
        rows = everyones.to(inner).mul_(here.unsqueeze(-1))
        table.index_put_((index,), rows, accumulate=True)  # index_add adds equal tokens in no fixed order on CUDA
        return None, table.to(grad.dtype), None, None


class _GatherHidden(torch.autograd.Function):
    """[t, d] -> [n, d]. Each rank applies its own vocabulary rows, so the backward sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Group, count: int) -> Tensor:
        ctx.group, ctx.count, ctx.dtype = group, count, hidden.dtype
        with labelled("vocabulary"):
            return group.all_gather(hidden, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner = torch.promote_types(grad.dtype, torch.float32)
        with labelled("vocabulary"):
            return ctx.group.reduce_scatter(grad.to(inner), ctx.count).to(ctx.dtype), None, None


class _Stack(torch.autograd.Function):
    """Three [n] -> three [W, n] of all ranks. What follows is equal on all ranks; the backward takes this rank's."""

    @staticmethod
    def forward(ctx: Any, group: Group, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.rank = group.rank
        ctx.set_materialize_grads(False)  # the loss seldom reads the entropy
        with labelled("vocabulary"):
            return group.stack(torch.stack(vectors)).unbind(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if grad is None else grad[ctx.rank] for grad in grads)
