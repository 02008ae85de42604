"""Softmax attention by PyTorch's own flash operator for CPUs: the fastest exact way there.

Its backward takes the output and the log-sum-exp as arguments, so each part can get those of the whole attention.
Shapes as in ``reference``. For a query that sees no row the operator returns log-sum-exp 0, which is wrong: every query
must see a row.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from longstraw.ops.attention import reference
from longstraw.ops.flops import Flops, OpFlops
from longstraw.ops.host_offload import QueryGradients

ROW_TILE = 512  # rows that the operator evaluates at a time
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def takes_all_rows(dtype: torch.dtype) -> bool:
    """Return False: temporaries grow with the number of retained rows, so they are evaluated in tiles."""
    return False


def part_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend as ``reference.part_forward`` does. A causal part has as many queries as rows."""
    out, lse = _forward(_queries(q, causal), _rows(k), _rows(v), 0.0, causal, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def part_backward(
    queries: QueryGradients, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as ``reference.part_backward`` does."""
    q = _queries(queries.q, causal)
    grad_q, grad_k, grad_v = _backward(
        _queries(queries.grad, causal),
        q,
        _rows(k),
        _rows(v),
        _queries(queries.out, causal),
        queries.lse.reshape(q.shape[:-1]),
        0.0,
        causal,
        scale=scale,
    )
    return grad_q.reshape(queries.q.shape), grad_k[0].transpose(0, 1), grad_v[0].transpose(0, 1)


operand_type = reference.operand_type
rows_backward = partial(reference.rows_backward, part_backward=part_backward)


def _pairs(queries: int, rows: int, causal: bool) -> int:
    """Return how many pairs of query and row are evaluated: causal ones in whole tiles of rows."""
    if not causal:
        return queries * rows
    starts = range(0, rows, ROW_TILE)
    return sum(min(ROW_TILE, queries - start) * min(start + ROW_TILE, rows) for start in starts)


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False) -> int:
    return 4 * q.shape[1] * q.shape[3] * _pairs(q.shape[2], k.shape[2], causal)


def _backward_flops(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *flags: bool) -> int:
    return 10 * q.shape[1] * q.shape[3] * _pairs(q.shape[2], k.shape[2], flags[1])


FLOPS: Flops = {
    _forward: OpFlops("attention", _forward_flops),
    _backward: OpFlops("attention_backward", _backward_flops),
}


def _queries(x: Tensor, causal: bool) -> Tensor:
    """View [N, R, T, D] as one batch: a head each where positions matter, else folded into longer heads (faster)."""
    heads, repeats, count, width = x.shape
    return x.reshape(1, heads * repeats, count, width) if causal else x.reshape(1, heads, repeats * count, width)


def _rows(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)
