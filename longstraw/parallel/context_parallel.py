"""A chunk's positions spread over ranks: the operations that join positions, with complete gradients.

Queries are sent, retained rows are not. Each rank attends with all of a chunk's queries to its own rows, and partial
results are merged by log-sum-exp. The backward sends queries and gradients in the same way, so the whole gradient of a
row is accumulated on the rank that holds it. Delta layers exchange positions for heads around convolution and scan. The
vocabulary is sharded by rows and never gathered: hidden states are sent.

Log-probabilities and the loss are computed on every rank from gathered values, so their gradient is the same on all
ranks; below them each rank's gradient is its own part of a sum over ranks.

W ranks, n positions of a chunk, t of them here, P retained rows here, H query heads, N key/value heads, D head width,
d model width, V rows of the vocabulary here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops import Ops
from longstraw.ops.attention import (
    AttentionParts,
    by_heads,
    by_tokens,
    merge_past,
    new_backward,
    new_forward,
    past_backward,
)
from longstraw.ops.chunk import Chunk
from longstraw.ops.host_offload import QueryGradients, RetainedRows
from longstraw.ops.kept import once
from longstraw.ops.past import BranchPast, Past
from longstraw.ops.sequence_ops import Sections
from longstraw.parallel import branches
from longstraw.parallel.collectives import GatherHeads, GatherPositions, Group, labelled
from longstraw.parallel.expert_parallel import ExpertGroup
from longstraw.parallel.fsdp import local_tensor
from longstraw.parallel.latent_context_parallel import SpreadLatent, attend_rows, select_rows
from longstraw.parallel.vocab_parallel import embed, vocabulary_logits, vocabulary_logprobs


class ContextParallel:
    """The methods of ``ops.sequence_ops.Context`` for ranks (``group``) that share each chunk's positions."""

    def __init__(self, ops: Ops, group: Group, experts: ExpertGroup):
        self._ops, self._group, self._experts = ops, group, experts

    def share(self, size: int) -> int:
        return size // self._group.size

    def embed(self, tokens: Tensor, weight: Tensor, chunk: Chunk | None) -> Tensor:
        return embed(tokens, weight, self._group)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: Past, *, scale: float) -> Tensor:
        assert past.chunk is not None
        if isinstance(past, BranchPast):
            return branches.attend(q, k, v, past, branches.SpreadRows(self._group, self._ops.attention, scale))
        spread = (self._group, self._ops.attention)
        return _SpreadAttention.apply(q, k, v, past.pair("key", "value"), scale, past.chunk, spread)

    def to_heads(self, tensors: Sequence[Tensor], sections: Sequence[Sections], chunk: Chunk | None) -> list[Tensor]:
        """Exchange all tensors at once, concatenated into one column for each rank."""
        assert chunk is not None
        columns = [
            part.unflatten(-1, (self._group.size, -1))
            for x, parts in zip(tensors, sections, strict=True)
            for part in x.split([heads * width for heads, width in parts], -1)
        ]
        with labelled("heads"):
            own = GatherHeads.apply(torch.cat(columns, -1), self._group, chunk.count)
        return list(own.split([self.share(x.shape[-1]) for x in tensors], -1))

    def to_positions(self, x: Tensor, chunk: Chunk | None) -> Tensor:
        assert chunk is not None
        with labelled("heads"):
            columns = GatherPositions.apply(x.flatten(1), self._group, chunk.count)
        return columns.unflatten(-1, x.shape[1:]).flatten(1, 2)

    def own_heads(self, weight: Tensor, sections: Sections) -> Tensor:
        parts = weight.split([heads * width for heads, width in sections])
        return torch.cat([part.unflatten(0, (self._group.size, -1))[self._group.rank] for part in parts])

    def select_rows(self, q: Tensor, weights: Tensor, key: Tensor, past: Past, count: int, *, scale: float) -> Tensor:
        spread = SpreadLatent(self._group, self._ops.latent, scale)
        if isinstance(past, BranchPast):
            return branches.select_rows(q, weights, key, past, count, spread)
        return select_rows(q, weights, key, past, count, spread)

    def attend_rows(self, q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, past: Past, *, scale: float) -> Tensor:
        spread = SpreadLatent(self._group, self._ops.latent, scale)
        if isinstance(past, BranchPast):
            return branches.attend_rows(q, new, rows, past, spread)
        return attend_rows(q, new, rows, past, spread)

    def mix_experts(self, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return self._experts.mix(x, chosen, weights, local_tensor(gate_up), local_tensor(down), ops=self._ops.moe)

    def logprob(self, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: Chunk | None) -> tuple[Tensor, Tensor]:
        return vocabulary_logprobs(hidden, weight, targets, self._group, self._ops.logits)

    def logits(self, hidden: Tensor, weight: Tensor, chunk: Chunk | None) -> Tensor:
        assert chunk is not None
        return vocabulary_logits(hidden, weight, chunk.count, self._group)

    def gather(self, x: Tensor, chunk: Chunk | None) -> Tensor:
        assert chunk is not None
        with labelled("vocabulary"):
            return self._group.all_gather(x, chunk.count)


class _SpreadAttention(torch.autograd.Function):
    """Causal attention of a chunk's queries to (past | new) rows, of which every rank holds some."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: RetainedRows,
        scale: float,
        chunk: Chunk,
        spread: tuple[Group, AttentionParts],
    ) -> Tensor:
        group, parts = spread

        def evaluate() -> tuple[Tensor, Tensor]:
            operand = parts.operand_type(q.dtype)
            queries = by_heads(group.all_gather(q, chunk.count).to(operand), k.shape[1])
            out, lse = new_forward(queries, k.to(operand), v.to(operand), chunk, scale=scale, parts=parts)
            merge_past(out, lse, queries, past, scale=scale, parts=parts)
            whole = group.stack(lse).logsumexp(0)
            out.mul_((lse - whole).exp_().unsqueeze(-1))
            return group.reduce_scatter(by_tokens(out), chunk.count).to(q.dtype), whole

        with labelled("attention"):
            merged, whole = once(past.kept, "attention", evaluate)
        ctx.save_for_backward(q, k, v, merged, whole)
        ctx.past, ctx.scale, ctx.chunk, ctx.spread = past, scale, chunk, spread
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        chunk, scale, (group, parts) = ctx.chunk, ctx.scale, ctx.spread
        operand = parts.operand_type(q.dtype)
        with labelled("attention"):
            grad = by_heads(group.all_gather(grad, chunk.count).to(operand), k.shape[1])
            everyones = by_heads(group.all_gather(q, chunk.count).to(operand), k.shape[1])
            out = by_heads(group.all_gather(out, chunk.count).to(operand), k.shape[1])
            queries = QueryGradients(grad, everyones, out, lse)
            grad_q, grad_k, grad_v = new_backward(
                queries, k.to(operand), v.to(operand), chunk, scale=scale, parts=parts
            )
            past_backward(grad_q, queries, ctx.past, scale=scale, parts=parts)
            own_q = group.reduce_scatter(by_tokens(grad_q), chunk.count)
        return own_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None
