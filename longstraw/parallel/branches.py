"""What joins positions over ranks, for one position of each of n branches that share a prompt; no gradients.

The branches are spread over ranks as positions are; every rank has the prompt's rows of some positions and the
branches' own rows of some response positions, for all branches. So queries and new rows are sent to all ranks, each
attends to what it has, and partial results are merged by log-sum-exp. See ``ops.branches``.

W ranks, n branches, t of them here, H query heads, N key/value heads, D head width, C latent width, R width of the
rotary key, I index heads, K chosen rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longstraw.ops import branches
from longstraw.ops.attention import AttentionParts, by_tokens
from longstraw.ops.past import BranchPast
from longstraw.parallel.collectives import Group, labelled
from longstraw.parallel.latent_context_parallel import SpreadLatent, last_chosen, widened


class SpreadRows(NamedTuple):
    """The ranks that hold the rows, a rank's own attention to them, and the scale of scores."""

    group: Group
    parts: AttentionParts
    scale: float


def attend(q: Tensor, k: Tensor, v: Tensor, past: BranchPast, spread: SpreadRows) -> Tensor:
    """Return the attention output [t, H, D] of ``q`` [t, H, D]; ``k``, ``v`` [t, N, D] are the new position's rows."""
    group, parts, scale = spread
    count = _count(past)
    with labelled("attention"):
        widths = [q.shape[1], k.shape[1], v.shape[1]]
        queries, keys, values = group.all_gather(torch.cat([q, k, v], 1), count).split(widths, 1)
        out, lse = branches.attend_here(queries, keys, values, past, scale=scale, parts=parts)
        return _merged(by_tokens(out), by_tokens(lse.unsqueeze(-1)).squeeze(-1), count, group).to(q.dtype)


def select_rows(q: Tensor, weights: Tensor, key: Tensor, past: BranchPast, count: int, spread: SpreadLatent) -> Tensor:
    """Return the rows here that each of all branches attends to: int32 [n, K] as ``attend_rows`` reads them, -1: none.

    ``q`` [t, I, D], ``weights`` [t, I] and ``key`` [t, D] are of the branches here.
    """
    group, ops, scale = spread
    assert past.chunk is not None
    count = min(count, past.positions + past.added + 1)
    with labelled("selection"):
        everyones = group.all_gather(q, past.chunk.count)
        mix = group.all_gather(weights, past.chunk.count)
        keys = group.all_gather(key, past.chunk.count)
        scores, positions = branches.best_here(ops, everyones, mix, keys, past, (count, scale))
        score, position = last_chosen(widened(scores, count), widened(positions, count), count, past.chunk, group)
    chosen = (scores > score) | ((scores == score) & (positions <= position))
    return branches.row_numbers(positions, past).masked_fill_(~chosen, -1)


def attend_rows(q: Tensor, new: tuple[Tensor, Tensor], rows: Tensor, past: BranchPast, spread: SpreadLatent) -> Tensor:
    """Return the output [t, H, C] of ``q`` [t, H, C + R] over the ``rows`` [n, K] that ``select_rows`` chose.

    ``new`` are the latent [t, C] and rotary key [t, R] of the new position.
    """
    group, ops, scale = spread
    count = _count(past)
    with labelled("attention"):
        queries = group.all_gather(q, count)
        everyones = group.all_gather(new[0], count), group.all_gather(new[1], count)
        out, lse = branches.attend_rows_here(queries, everyones, rows, past, scale=scale, ops=ops)
        return _merged(out.to(lse.dtype), lse, count, group).to(q.dtype)


def _count(past: BranchPast) -> int:
    assert past.chunk is not None
    return past.chunk.count


def _merged(out: Tensor, lse: Tensor, count: int, group: Group) -> Tensor:
    """Return [t, H, D] of all ranks' parts ``out`` [n, H, D] with their log-sum-exp ``lse`` [n, H]."""
    whole = group.stack(lse).logsumexp(0)
    return group.reduce_scatter(out.mul_((lse - whole).exp_().unsqueeze(-1)), count)
