"""Attention of new tokens over what is retained and over themselves, without joining the two.

Each part gives its output and log-sum-exp; the parts are merged by log-sum-exp. In the backward every part gets the
merged output and log-sum-exp, and the gradient of retained rows is added straight into the state's gradient buffer:
no tensor of the prompt's size is made.

T new positions, P retained ones, H query heads, N key/value heads, R = H / N, D width of a head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.attention import cpu, fused, reference
from longstraw.ops.attention.reference import Buffers
from longstraw.ops.chunk import Chunk, whole
from longstraw.ops.host_offload import QueryGradients, RetainedRows, tiles
from longstraw.ops.kept import once
from longstraw.ops.past import Past

ROW_TILE = 16384  # retained rows evaluated at a time: bounds the temporaries of the backward


class AttentionParts(Protocol):
    """What a backend provides: one part of a split attention, forward and backward (see ``reference``)."""

    def operand_type(self, dtype: torch.dtype) -> torch.dtype: ...

    def takes_all_rows(self, dtype: torch.dtype) -> bool: ...

    def part_forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...

    def part_backward(
        self, queries: QueryGradients, k: Tensor, v: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def rows_backward(
        self, queries: QueryGradients, k: Tensor, v: Tensor, buffers: Buffers, *, scale: float
    ) -> Tensor: ...


PARTS: dict[str, AttentionParts] = {"reference": reference, "cpu": cpu, "cuda": fused}


def attend(q: Tensor, k: Tensor, v: Tensor, past: RetainedRows, *, scale: float, parts: AttentionParts) -> Tensor:
    """Return the causal attention output [T, H, D] of ``q`` [T, H, D] over (past | new) rows.

    ``k``, ``v`` [T, N, D] are the new rows; ``past`` holds the retained keys and values [P, N, D], which all precede
    them, and buffers [G, N, D] for the gradient of the last G of them.
    """
    return _SplitAttention.apply(q, k, v, past, scale, parts, whole(len(q)))


def attend_segments(q: Tensor, k: Tensor, v: Tensor, past: Past, *, scale: float, parts: AttentionParts) -> Tensor:
    """Return what ``attend`` does for each segment of ``past.chunk``; the retained rows are read once for all."""
    return _SplitAttention.apply(q, k, v, past.pair("key", "value"), scale, parts, past.chunk)


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: RetainedRows,
        scale: float,
        parts: AttentionParts,
        chunk: Chunk,
    ) -> Tensor:
        def evaluate() -> tuple[Tensor, Tensor]:
            operand = parts.operand_type(q.dtype)
            queries = by_heads(q.to(operand), k.shape[1])
            out, lse = new_forward(queries, k.to(operand), v.to(operand), chunk, scale=scale, parts=parts)
            merge_past(out, lse, queries, past, scale=scale, parts=parts)
            return by_tokens(out).to(q.dtype), lse

        out, lse = once(past.kept, "attention", evaluate)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.past, ctx.scale, ctx.parts, ctx.chunk = past, scale, parts, chunk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        operand = ctx.parts.operand_type(q.dtype)
        grad, by_head, out = (by_heads(x.to(operand), k.shape[1]) for x in (grad, q, out))
        queries = QueryGradients(grad, by_head, out, lse)
        grad_q, grad_k, grad_v = new_backward(
            queries, k.to(operand), v.to(operand), ctx.chunk, scale=ctx.scale, parts=ctx.parts
        )
        past_backward(grad_q, queries, ctx.past, scale=ctx.scale, parts=ctx.parts)
        return by_tokens(grad_q).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), *[None] * 4


def new_forward(
    q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, *, scale: float, parts: AttentionParts
) -> tuple[Tensor, Tensor]:
    """Attend all of a chunk's queries ``q`` [N, R, n, D] to the new rows ``k``, ``v`` [t, N, D] that are here.

    A query sees the rows of its own segment up to its own position. Returns the output [N, R, n, D] and the log-sum-exp
    [N, R, n], 0 and -inf where no such row is here; at least float32.
    """
    if chunk.is_whole:
        return parts.part_forward(q, k, v, causal=True, scale=scale)
    inner = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, dtype=inner)
    lse = out.new_full(q.shape[:-1], -torch.inf)
    own_q, own_out, own_lse = (x[:, :, chunk.own].movedim(2, 0) for x in (q, out, lse))
    for batch in chunk.own_batches:
        queries = batch.fold(own_q).movedim(0, 2).contiguous()
        part, sums = parts.part_forward(queries, batch.fold(k), batch.fold(v), causal=True, scale=scale)
        batch.unfold(part.movedim(2, 0), own_out)
        batch.unfold(sums.movedim(2, 0), own_lse)
        del queries, part, sums  # before the next ones are made
    for rows, later in chunk.later:
        block = q[:, :, later].contiguous()
        out[:, :, later], lse[:, :, later] = parts.part_forward(block, k[rows], v[rows], causal=False, scale=scale)
    return out, lse


def new_backward(
    queries: QueryGradients, k: Tensor, v: Tensor, chunk: Chunk, *, scale: float, parts: AttentionParts
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of what ``new_forward`` attends with: of queries [N, R, n, D] and rows [t, N, D]."""
    if chunk.is_whole:
        return parts.part_backward(queries, k, v, causal=True, scale=scale)
    inner = torch.promote_types(queries.q.dtype, torch.float32)
    grad_q = torch.zeros_like(queries.q, dtype=inner)
    grad_k, grad_v = torch.zeros_like(k, dtype=inner), torch.zeros_like(v, dtype=inner)
    own = [x[:, :, chunk.own].movedim(2, 0) for x in queries]
    for batch in chunk.own_batches:
        block = QueryGradients(*(batch.fold(x).movedim(0, 2).contiguous() for x in own))
        parts_of = parts.part_backward(block, batch.fold(k), batch.fold(v), causal=True, scale=scale)
        batch.unfold(parts_of[0].movedim(2, 0), grad_q[:, :, chunk.own].movedim(2, 0))
        batch.unfold(parts_of[1], grad_k)
        batch.unfold(parts_of[2], grad_v)
        del block, parts_of  # before the next ones are made
    for rows, later in chunk.later:
        block = QueryGradients(*(x[:, :, later].contiguous() for x in queries))
        later_q, rows_k, rows_v = parts.part_backward(block, k[rows], v[rows], causal=False, scale=scale)
        grad_q[:, :, later] += later_q
        grad_k[rows] += rows_k
        grad_v[rows] += rows_v
        del block, later_q, rows_k, rows_v
    return grad_q, grad_k, grad_v


def merge_past(out: Tensor, lse: Tensor, q: Tensor, past: RetainedRows, *, scale: float, parts: AttentionParts) -> None:
    """Merge the attention of ``q`` [N, R, T, D] to all retained rows into ``out`` [N, R, T, D], ``lse`` [N, R, T]."""
    if not q.numel():
        return
    past = RetainedRows(past.rows)
    for (key, value), _ in tiles(past.rows, (), q.dtype, _tile(past, q.dtype, parts)):
        _merge(out, lse, *parts.part_forward(q, key, value, causal=False, scale=scale))
        del key, value  # gone before the next tile's are made


def past_backward(
    grad_q: Tensor, queries: QueryGradients, past: RetainedRows, *, scale: float, parts: AttentionParts
) -> None:
    """Add the gradient through retained rows to ``grad_q`` [N, R, T, D], and the rows' own into their buffers."""
    if not queries.q.numel():
        return
    dtype = queries.q.dtype
    for (key, value), (key_grad, value_grad) in tiles(past.rows, past.grads, dtype, _tile(past, dtype, parts)):
        grad_q += parts.rows_backward(queries, key, value, (key_grad, value_grad), scale=scale)
        del key, value, key_grad, value_grad  # gone before the next tile's are made


def _tile(past: RetainedRows, dtype: torch.dtype, parts: AttentionParts) -> int:
    """Return how many retained rows are evaluated at a time: all, if no copies of them are needed."""
    wide = torch.promote_types(dtype, torch.float32)
    rows = all(isinstance(x, Tensor) and x.dtype == dtype for x in past.rows)
    sums = all(x is None or (isinstance(x, Tensor) and x.dtype == wide) for x in past.grads)
    return max(len(past.rows[0]), 1) if rows and sums and parts.takes_all_rows(dtype) else ROW_TILE


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge another part into ``out``, ``lse`` in place: softmax over the union of both parts' rows."""
    total = torch.logaddexp(lse, other_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.add_(other_out.mul_((other_lse - total).exp_().unsqueeze(-1)))
    lse.copy_(total)


def by_heads(x: Tensor, heads: int) -> Tensor:
    """[T, H, D] -> [N, R, T, D], contiguous."""
    return x.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).contiguous()


def by_tokens(x: Tensor) -> Tensor:
    """[N, R, T, D] -> [T, H, D], contiguous."""
    return x.flatten(0, 1).transpose(0, 1).contiguous()
