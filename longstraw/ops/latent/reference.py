"""Attention over chosen latent rows, and the choice of rows, in plain PyTorch and in tiles.

The reference that faster versions are tested against: any device; at least float32 inside; float64 stays float64.

T new positions, P retained ones, K chosen rows a query, H heads, C latent width, R width of the rotary key,
I index heads, D index width. Row numbers count over (past | new): row P is the first new one; -1 is no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longstraw.ops.host_offload import QueryGradients

GATHER_TILE = 2**24  # elements of gathered rows evaluated at a time
SCORE_TILE = 2**23  # query x index head x key scores evaluated at a time
KEY_TILE = 4096  # index keys scored at a time

Rows = tuple[Tensor, Tensor]  # latent [., C], rotary key [., R]
Buffers = tuple[Tensor | None, Tensor | None]


def attend_forward(q: Tensor, past: Rows, new: Rows, rows: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attend each query of ``q`` [T, H, C + R] to its ``rows`` [T, K]: keys are whole rows, values their latents.

    Returns the output [T, H, C] in the dtype of ``q`` and the natural log-sum-exp [T, H] of the scores, at least
    float32; a query without any row gives 0 and -inf.
    """
    width = new[0].shape[-1]
    inner = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(*q.shape[:2], width), q.new_empty(q.shape[:2], dtype=inner)
    for tile in _query_tiles(q, rows):
        gathered, absent = _gather(past, new, rows[tile], inner)
        scores = _scores(q[tile].to(inner), gathered, absent, scale)
        lse[tile] = scores.logsumexp(-1)
        weights = scores.sub_(_finite(lse[tile])).exp_()
        out[tile] = (weights @ gathered[..., :width]).to(out.dtype)
        del gathered, absent, scores, weights  # before the next tile's are made
    return out, lse


def attend_backward(
    queries: QueryGradients, past: Rows, new: Rows, rows: Tensor, past_grads: Buffers, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries and of both new rows; add that of retained rows into ``past_grads``.

    A buffer covers the last rows of the past, as many as it has.
    """
    grad, q, out, lse = queries
    width, retained = new[0].shape[-1], len(past[0])
    inner = lse.dtype
    grad_q = torch.empty_like(q)
    grad_new = [torch.zeros_like(part, dtype=inner) for part in new]
    for tile in _query_tiles(q, rows):
        gathered, absent = _gather(past, new, rows[tile], inner)
        query, grad_out = q[tile].to(inner), grad[tile].to(inner)
        weights = _scores(query, gathered, absent, scale).sub_(_finite(lse[tile])).exp_()
        delta = (grad_out * out[tile].to(inner)).sum(-1, keepdim=True)
        grad_scores = grad_out @ gathered[..., :width].transpose(-1, -2)
        grad_scores.sub_(delta).mul_(weights).mul_(scale)
        grad_q[tile] = (grad_scores @ gathered).to(q.dtype)
        grad_rows = grad_scores.transpose(-1, -2) @ query
        grad_rows[..., :width] += weights.transpose(-1, -2) @ grad_out
        for new_grad, past_grad, part in zip(
            grad_new, past_grads, grad_rows.split([width, query.shape[-1] - width], -1), strict=True
        ):
            _add_rows(new_grad, part, rows[tile] - retained)
            if past_grad is not None:
                _add_rows(past_grad, part, rows[tile] - (retained - len(past_grad)))
        del gathered, absent, weights, grad_scores, grad_rows, part
    return grad_q, grad_new[0].to(new[0].dtype), grad_new[1].to(new[1].dtype)


def select_rows(q: Tensor, weights: Tensor, past_key: Tensor, key: Tensor, count: int, *, scale: float) -> Tensor:
    """Return the ``count`` best rows over (past | new) of each query, int32 [T, K], as ``best_rows`` orders them.

    ``key`` [T, D] are the index keys of the queries' own positions, ``past_key`` [P, D] those of all before.
    """
    retained = len(past_key)
    positions = torch.arange(retained + len(key), dtype=torch.int32, device=q.device)
    parts = [(past_key, positions[:retained]), (key, positions[retained:])]
    return best_rows(q, weights, parts, positions[retained:], min(count, len(positions)), scale=scale)[1]


def best_rows(
    q: Tensor, weights: Tensor, parts: Sequence[tuple[Tensor, Tensor]], queried: Tensor, count: int, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best rows of each query: their scores [T, K] and positions, int32 [T, K].

    ``q`` [T, I, D] and ``weights`` [T, I] are of positions ``queried`` [T]; ``parts`` hold index keys [S, D] with their
    positions [S], rising over all parts. The score of a row is ``sum_i weights[t, i] relu(scale q[t, i] . key)``; a
    query sees its own position and those before. The order is total: by falling score, then by rising position. Scores
    tie at exactly 0, and any other rule would make the choice depend on how the prompt was cut. The best rows stand by
    rising position, after -inf and -1 where a query sees fewer.
    """
    inner = torch.promote_types(q.dtype, torch.float32)
    best = q.new_full((len(q), count), -torch.inf, dtype=inner)
    rows = queried.new_full((len(q), count), -1)
    size = max(SCORE_TILE // (q.shape[1] * KEY_TILE), 1)
    for tile in (slice(start, start + size) for start in range(0, len(q), size)):
        queries, mix = q[tile].to(inner), weights[tile].to(inner)
        for keys, positions in (
            piece for part in parts for piece in zip(*(x.split(KEY_TILE) for x in part), strict=True)
        ):
            future = positions > queried[tile, None]
            scores = index_scores(queries, mix, keys.to(inner), scale=scale).masked_fill_(future, -torch.inf)
            seen = positions.expand(scores.shape).masked_fill(future, -1)
            best[tile], rows[tile] = keep_best(
                torch.cat([best[tile], scores], -1), torch.cat([rows[tile], seen], -1), count
            )
    return best, rows


def index_scores(q: Tensor, weights: Tensor, key: Tensor, *, scale: float) -> Tensor:
    """Return the scores [T, S] of ``key`` [S, D] for ``q`` [T, I, D] and ``weights`` [T, I], nothing hidden."""
    scores = (q.flatten(0, 1) @ key.T).mul_(scale).relu_()
    return (weights.unsqueeze(1) @ scores.view(*q.shape[:2], -1)).squeeze(1)


def keep_best(scores: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` highest ``scores`` [T, S] of each line with their ``rows`` [T, S], in the order they stand.

    Of equal scores the first ones are kept, so lines stand by rising row. No sort is needed: the lowest score kept is
    known, and what is kept moves up to its place.
    """
    lowest = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > lowest, scores == lowest
    spare = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= spare))
    place = torch.where(kept, kept.cumsum(-1) - 1, count)  # rows not kept go to one extra column
    best = scores.new_empty(len(scores), count + 1).scatter_(-1, place, scores)
    best_rows = rows.new_empty(len(rows), count + 1).scatter_(-1, place, rows)
    return best[:, :count], best_rows[:, :count]


def _query_tiles(q: Tensor, rows: Tensor) -> list[slice]:
    size = max(GATHER_TILE // max(rows.shape[1] * q.shape[-1], 1), 1)
    return [slice(start, min(start + size, len(q))) for start in range(0, len(q), size)]


def _gather(past: Rows, new: Rows, rows: Tensor, inner: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the chosen rows [t, K, C + R] over (past | new) and which of them [t, K] are none."""
    retained, rows = len(past[0]), rows.long()
    gathered = _take(new, rows - retained)
    if retained:
        gathered = torch.where((rows < retained).unsqueeze(-1), _take(past, rows), gathered)
    return gathered.to(inner), rows < 0


def _take(parts: Rows, rows: Tensor) -> Tensor:
    """Return ``rows`` of both parts side by side, anything for those outside."""
    if not len(parts[0]):
        return parts[0].new_zeros(*rows.shape, sum(part.shape[-1] for part in parts))
    rows = rows.clamp(0, len(parts[0]) - 1)
    return torch.cat([part[rows] for part in parts], -1)


def _scores(q: Tensor, gathered: Tensor, absent: Tensor, scale: float) -> Tensor:
    """[t, H, K], -inf where there is no row."""
    return (q @ gathered.transpose(-1, -2)).mul_(scale).masked_fill_(absent.unsqueeze(1), -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf so that a query without rows gives 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)


def _add_rows(buffer: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Add ``grad`` [t, K, .] at ``rows`` [t, K] of ``buffer``, those outside it left out."""
    if not len(buffer):
        return
    inside = (rows >= 0) & (rows < len(buffer))
    at = rows.clamp(0, len(buffer) - 1).flatten().long()
    buffer.index_add_(0, at, (grad * inside.unsqueeze(-1)).flatten(0, 1).to(buffer.dtype))
