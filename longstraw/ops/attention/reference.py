"""Softmax attention in plain PyTorch, in tiles: the reference that faster versions are tested against.

N key/value heads, R query heads per key/value head, T queries, S rows, D width of a head.
Tensors are at least float32; any device; float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longstraw.ops.host_offload import QueryGradients

Buffers = tuple[Tensor | None, Tensor | None]  # for the gradients of keys and of values

_TILE = 512  # queries x rows of one tile of scores


def operand_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which queries, rows and gradients of ``dtype`` are handed over: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def takes_all_rows(dtype: torch.dtype) -> bool:
    """Return False: temporaries grow with the number of retained rows, so they are evaluated in tiles."""
    return False


def part_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend ``q`` [N, R, T, D] to the rows ``k``, ``v`` [S, N, D]; ``causal`` hides row j from query i < j.

    Returns the output [N, R, T, D] and the natural log-sum-exp [N, R, T] of the scores.
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for start in range(0, q.shape[2], _TILE):
        queries = slice(start, start + _TILE)
        tile = q[:, :, queries]
        highest = tile.new_full((*tile.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(highest)
        gathered = torch.zeros_like(tile)
        for rows in _row_tiles(k.shape[0], start + tile.shape[2] if causal else None):
            scores = _scores(tile, k[rows], start, rows.start, causal, scale)
            raised = torch.maximum(highest, scores.amax(-1, keepdim=True))
            scores.sub_(raised).exp_()
            decay = (highest - raised).exp_()
            total.mul_(decay).add_(scores.sum(-1, keepdim=True))
            gathered.mul_(decay).add_(scores @ v[rows].movedim(1, 0).unsqueeze(1))
            highest = raised
        out[:, :, queries] = gathered / total
        lse[:, :, queries] = (highest + total.log()).squeeze(-1)
    return out, lse


def part_backward(
    queries: QueryGradients, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``queries.q`` [N, R, T, D] and of ``k``, ``v`` [S, N, D] for one part of an attention."""
    grad, q, out, lse = queries
    delta = (grad * out).sum(-1, keepdim=True)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[2], _TILE):
        own = slice(start, start + _TILE)
        tile, tile_grad = q[:, :, own], grad[:, :, own]
        for rows in _row_tiles(k.shape[0], start + tile.shape[2] if causal else None):
            keys = k[rows].movedim(1, 0).unsqueeze(1)
            scores = _scores(tile, k[rows], start, rows.start, causal, scale)
            weights = scores.sub_(lse[:, :, own, None]).exp_()
            grad_v[rows] += (weights.transpose(-1, -2) @ tile_grad).sum(1).movedim(0, 1)
            grad_scores = tile_grad @ v[rows].movedim(1, 0).unsqueeze(1).transpose(-1, -2)
            grad_scores.sub_(delta[:, :, own]).mul_(weights).mul_(scale)
            grad_q[:, :, own] += grad_scores @ keys
            grad_k[rows] += (grad_scores.transpose(-1, -2) @ tile).sum(1).movedim(0, 1)
    return grad_q, grad_k, grad_v


def rows_backward(
    queries: QueryGradients,
    k: Tensor,
    v: Tensor,
    buffers: Buffers,
    *,
    scale: float,
    part_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = part_backward,
) -> Tensor:
    """Return the gradient of the queries for rows that all of them see; add that of the rows into ``buffers``.

    A buffer [G, N, D] covers the last G rows of ``k`` or ``v`` [S, N, D], or is None.
    """
    grad_q, *grad_rows = part_backward(queries, k, v, causal=False, scale=scale)
    for buffer, rows in zip(buffers, grad_rows, strict=True):
        if buffer is not None:
            buffer += rows[len(rows) - len(buffer) :]
    return grad_q


def _row_tiles(rows: int, visible: int | None) -> list[slice]:
    end = rows if visible is None else min(rows, visible)
    return [slice(start, min(start + _TILE, end)) for start in range(0, end, _TILE)]


def _scores(q: Tensor, k: Tensor, first_query: int, first_row: int, causal: bool, scale: float) -> Tensor:
    """Return scores [N, R, T, S] of one tile, minus infinity where a row comes after the query."""
    scores = (q * scale) @ k.movedim(1, 0).unsqueeze(1).transpose(-1, -2)
    if causal:
        queries = torch.arange(first_query, first_query + q.shape[2], device=q.device)
        rows = torch.arange(first_row, first_row + k.shape[0], device=q.device)
        scores.masked_fill_(rows > queries[:, None], -torch.inf)
    return scores
