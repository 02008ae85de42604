"""Latent attention over chosen rows, and the choice of the top K rows, with the rows sharded over ranks.

Each rank scores its own rows for all of a chunk's queries and keeps its best. A query's owner gets every rank's best
scores and finds the score and position of the last one chosen; those two numbers are sent back, and every rank keeps
its own rows up to there. No scores of the prompt's size are made or sent, and the choice equals that of one rank.

W ranks, n positions of a chunk, t of them here, P retained rows here, K chosen rows a query, H heads, C latent width,
R width of the rotary key, I index heads, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.chunk import Chunk
from longstraw.ops.host_offload import QueryGradients, RetainedRows
from longstraw.ops.kept import once
from longstraw.ops.latent import LatentOps, packed
from longstraw.ops.past import Past
from longstraw.parallel.collectives import Group, labelled

MERGE_TILE = 2**23  # candidates that are merged together


class SpreadLatent(NamedTuple):
    """The ranks that hold the rows, a rank's own operations on them, and the scale of scores."""

    group: Group
    ops: LatentOps
    scale: float


def select_rows(q: Tensor, weights: Tensor, key: Tensor, past: Past, count: int, spread: SpreadLatent) -> Tensor:
    """Return the rows here that each of the chunk's queries attends to: int32 [n, K], over (past | new), -1 for none.

    ``q`` [t, I, D], ``weights`` [t, I] and ``key`` [t, D] are of this rank's positions, the past's ``index_key`` [P, D]
    of those in ``past.spans``.
    """
    chunk, positions, past_key = past.chunk, past.positions, past.rows("index_key")
    assert chunk is not None
    group, ops, scale = spread
    count = max(min(count, positions + chunk.count), 1)
    held = _positions(past.spans, (positions + chunk.start, positions + chunk.stop), device=q.device)
    retained, new = (past_key, held[: len(past_key)]), (key, held[len(past_key) :])
    queried = torch.arange(positions, positions + chunk.count, dtype=torch.int32, device=q.device)
    with labelled("selection"):
        everyones = group.all_gather(q, chunk.count)
        mix = group.all_gather(weights, chunk.count)
        if chunk.is_packed:
            scores, rows = packed.best_rows(ops, everyones, mix, (retained, new), past, (count, scale))
        else:
            scores, rows = ops.best_rows(
                everyones, mix, [retained, new], queried, max(min(count, len(held)), 1), scale=scale
            )
        del everyones, mix
        score, position = last_chosen(widened(scores, count), widened(rows, count), count, chunk, group)
    chosen = ((scores > score) | ((scores == score) & (rows <= position))) & (rows >= 0)
    here = torch.searchsorted(held, rows.clamp(min=0), out_int32=True)
    return here.masked_fill_(~chosen, -1)


def attend_rows(q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, past: Past, spread: SpreadLatent) -> Tensor:
    """Return the output [t, H, C] of ``q`` [t, H, C + R] over its chosen rows of all ranks.

    ``new`` ([t, C], [t, R]) and the past's ``latent`` and ``rope_key`` are the rows here, ``rows`` [n, K] what
    ``select_rows`` chose of them for every query of the chunk.
    """
    return _SpreadRows.apply(q, *new, rows, past.pair("latent", "rope_key"), past.chunk, spread)


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        rope_key: Tensor,
        rows: Tensor,
        past: RetainedRows,
        chunk: Chunk,
        spread: SpreadLatent,
    ) -> Tensor:
        group, ops, scale = spread

        def evaluate() -> tuple[Tensor, Tensor]:
            queries = group.all_gather(q, chunk.count)
            out, lse = ops.attend_forward(queries, past, (latent, rope_key), rows, scale=scale)
            del queries
            whole = group.stack(lse).logsumexp(0)
            out = out.to(lse.dtype).mul_((lse - whole).exp_().unsqueeze(-1))
            return group.reduce_scatter(out, chunk.count).to(q.dtype), whole

        with labelled("attention"):
            merged, whole = once(past.kept, "attention", evaluate)
        ctx.save_for_backward(q, latent, rope_key, rows, merged, whole)
        ctx.past, ctx.chunk, ctx.spread = past, chunk, spread
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, rope_key, rows, out, lse = ctx.saved_tensors
        group, ops, scale = ctx.spread
        with labelled("attention"):
            grad = group.all_gather(grad, ctx.chunk.count)
            everyones = group.all_gather(q, ctx.chunk.count)
            out = group.all_gather(out, ctx.chunk.count)
            queries = QueryGradients(grad, everyones, out, lse)
            grad_q, grad_latent, grad_rope = ops.attend_backward(
                queries, ctx.past, (latent, rope_key), rows, scale=scale
            )
            own_q = group.reduce_scatter(grad_q.to(lse.dtype), ctx.chunk.count).to(q.dtype)
        return own_q, grad_latent, grad_rope, None, None, None, None


def _positions(spans: Sequence[tuple[int, int]], new: tuple[int, int], *, device: torch.device) -> Tensor:
    """Return the positions of the rows here, retained and new, rising; int32."""
    return torch.cat([torch.arange(*span, dtype=torch.int32, device=device) for span in (*spans, new)])


def widened(x: Tensor, count: int) -> Tensor:
    """Pad candidates up to ``count`` with score -inf and row -1, as ``best_rows`` does."""
    if x.shape[1] == count:
        return x
    none = -torch.inf if x.is_floating_point() else -1
    return torch.cat([x.new_full((len(x), count - x.shape[1]), none), x], -1)


def last_chosen(scores: Tensor, rows: Tensor, count: int, chunk: Chunk, group: Group) -> tuple[Tensor, Tensor]:
    """Return the lowest score that each of the chunk's queries chose and the last position chosen at it; both [n, 1].

    ``scores``, ``rows`` [n, K] are this rank's candidates for all queries, as scores and positions.
    """
    scores = group.gather_positions(scores, chunk.count).flatten(1)  # [t, W K]
    rows = group.gather_positions(rows, chunk.count).flatten(1)
    lowest, position = scores.new_empty(len(scores), 1), rows.new_empty(len(rows), 1)
    size = max(MERGE_TILE // max(scores.shape[1], 1), 1)
    for tile in (slice(start, start + size) for start in range(0, len(scores), size)):
        score = scores[tile].topk(count, sorted=False).values.amin(-1, keepdim=True)
        spare = count - (scores[tile] > score).sum(-1, keepdim=True)
        level = rows[tile].masked_fill(scores[tile] != score, torch.iinfo(rows.dtype).max).sort(-1).values
        lowest[tile], position[tile] = score, level.gather(1, spare - 1)
    lowest = group.all_gather(lowest, chunk.count)
    return lowest, group.all_gather(position, chunk.count)
