"""The ops of latent attention for CUDA: attention over chosen rows, and their choice; see ``reference``.

Every tensor is allocated here, before the custom operator that fills it, and the operators allocate nothing: on fake
tensors the same bytes are counted. Triton is imported when a kernel is launched.

T new positions, P retained ones, K chosen rows a query, H heads, C latent width, R width of the rotary key,
I index heads, D index width, S index keys of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longstraw.ops.flops import Flops, OpFlops
from longstraw.ops.host_offload import QueryGradients
from longstraw.ops.latent.reference import Buffers, Rows
from longstraw.ops.lazy_module import LazyModule

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WEIGHT_TILE = 2**25  # attention weights kept between the two kernels of the backward, 64 MiB in bfloat16, twice
QUERY_TILE = 2048  # queries attended to, or scored, at a time
CANDIDATES = 2**13  # rows that one program chooses from: the best so far and newly scored ones
MOST = 2**13  # rows a query: twice as many candidates are counted in 16 bits
kernels = LazyModule("longstraw.ops.latent.kernels")


def attend_forward(q: Tensor, past: Rows, new: Rows, rows: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attend each query to its rows; arguments and results as in ``reference``."""
    _check(q)
    out = q.new_empty(*q.shape[:2], new[0].shape[-1])
    lse = q.new_empty(q.shape[:2], dtype=inner_dtype(q))
    chosen, number = _compacted(rows, min(len(q), QUERY_TILE))
    _forward(*(_rowwise(x, q.dtype) for x in (q, *past, *new)), _rowwise(rows), chosen, number, out, lse, scale)
    return out, lse


def attend_backward(
    queries: QueryGradients, past: Rows, new: Rows, rows: Tensor, past_grads: Buffers, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients and add those of retained rows into ``past_grads``; arguments and results as in ``reference``.

    Sums over queries are taken by atomic additions, in no fixed order, in float32.
    """
    grad, q, out, lse = queries
    _check(q)
    inner = inner_dtype(q)
    _check_buffers(past_grads, inner)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_new = [torch.zeros_like(part, dtype=inner, memory_format=torch.contiguous_format) for part in new]
    tile = min(len(q), max(WEIGHT_TILE // max(rows.shape[1] * q.shape[1], 1), 1), 65_535)  # largest size of a grid
    chosen, number = _compacted(rows, tile)
    kept = [q.new_empty(tile, rows.shape[1], q.shape[1]) for _ in range(2)]
    _backward(
        *(_rowwise(x, q.dtype) for x in (grad, q, *past, *new)),
        *(_rowwise(rows), chosen, number, _rowwise(out, q.dtype), lse.contiguous()),
        *(grad_q, *grad_new, *past_grads, *kept, scale),
    )
    return grad_q, grad_new[0].to(new[0].dtype), grad_new[1].to(new[1].dtype)


def select_rows(q: Tensor, weights: Tensor, past_key: Tensor, key: Tensor, count: int, *, scale: float) -> Tensor:
    """Return the ``count`` best rows over (past | new) of each query; arguments and result as in ``reference``."""
    retained = len(past_key)
    positions = torch.arange(retained + len(key), dtype=torch.int32, device=q.device)
    parts = [(past_key, positions[:retained]), (key, positions[retained:])]
    return best_rows(q, weights, parts, positions[retained:], min(count, len(positions)), scale=scale)[1]


def best_rows(
    q: Tensor, weights: Tensor, parts: Sequence[tuple[Tensor, Tensor]], queried: Tensor, count: int, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Return scores and positions of the ``count`` best rows of each query; arguments, order as in ``reference``."""
    _check(q)
    if count > MOST:
        raise ValueError(f"count={count} rows a query: the kernel takes 1 to {MOST}; use backend=reference for more")
    best = q.new_full((len(q), count), -torch.inf, dtype=inner_dtype(q))
    rows = queried.new_full((len(q), count), -1)
    longest = max((len(key) for key, _ in parts), default=0)
    block = min(max(CANDIDATES, power(2 * count)), power(count + longest))
    scores = best.new_empty(min(len(q), QUERY_TILE), min(block - count, longest))
    q, weights = _rowwise(q), _rowwise(weights)
    for key, positions in parts:  # a query sees the first rows of a part
        positions = positions.contiguous()
        seen = torch.searchsorted(positions, queried, right=True, out_int32=True)
        _best_rows(q, weights, _rowwise(key, q.dtype), positions, seen, scores, best, rows, scale)
    return best, rows


# The operators that launch kernels. They mutate all outputs and workspaces, which are allocated above.


@torch.library.custom_op("longstraw::latent_forward", mutates_args=("chosen", "number", "out", "lse"))
def _forward(
    q: Tensor, past_latent: Tensor, past_rope: Tensor, latent: Tensor, rope: Tensor, rows: Tensor,
    chosen: Tensor, number: Tensor, out: Tensor, lse: Tensor, scale: float,
) -> None:  # fmt: skip
    kernels.attend_forward(q, past_latent, past_rope, latent, rope, rows, chosen, number, out, lse, scale)


@torch.library.custom_op(
    "longstraw::latent_backward",
    mutates_args=(
        *("chosen", "number", "grad_q", "grad_latent", "grad_rope", "past_grad_latent", "past_grad_rope"),
        *("weights", "grad_scores"),
    ),
)
def _backward(
    grad: Tensor, q: Tensor, past_latent: Tensor, past_rope: Tensor, latent: Tensor, rope: Tensor, rows: Tensor,
    chosen: Tensor, number: Tensor, out: Tensor, lse: Tensor, grad_q: Tensor, grad_latent: Tensor, grad_rope: Tensor,
    past_grad_latent: Tensor | None, past_grad_rope: Tensor | None, weights: Tensor, grad_scores: Tensor, scale: float,
) -> None:  # fmt: skip
    kernels.attend_backward(
        grad, q, past_latent, past_rope, latent, rope, rows, chosen, number, out, lse, grad_q, grad_latent, grad_rope,
        past_grad_latent, past_grad_rope, weights, grad_scores, scale,
    )  # fmt: skip


@torch.library.custom_op("longstraw::latent_best_rows", mutates_args=("scores", "best", "rows"))
def _best_rows(
    q: Tensor, weights: Tensor, key: Tensor, positions: Tensor, seen: Tensor, scores: Tensor, best: Tensor,
    rows: Tensor, scale: float,
) -> None:  # fmt: skip
    kernels.best_rows(q, weights, key, positions, seen, scores, best, rows, scale)


@_forward.register_fake
@_backward.register_fake
@_best_rows.register_fake
def _nothing(*_: object) -> None:
    """Allocate nothing."""


def _chosen(latent: Tensor, rows: Tensor) -> int:
    """Return how many (query, row) pairs are evaluated here, where the ranks have even shares of the chosen rows."""
    return rows.numel() * len(latent) // max(len(rows), 1)


def _forward_flops(q: Tensor, past: Tensor, past_rope: Tensor, latent: Tensor, rope: Tensor, *rest: Any) -> int:
    return 2 * q.shape[1] * (q.shape[2] + latent.shape[1]) * _chosen(latent, rest[0])


def _backward_flops(grad: Tensor, q: Tensor, past: Tensor, past_rope: Tensor, latent: Tensor, *rest: Any) -> int:
    """Scores, their gradient and that of queries; if rows have a gradient, that of keys and of values too."""
    keys, values, graded = q.shape[2], latent.shape[1], rest[9] is not None
    return 2 * q.shape[1] * ((2 + graded) * keys + (1 + graded) * values) * _chosen(latent, rest[1])


def _scores_flops(q: Tensor, weights: Tensor, key: Tensor, *_: Any) -> int:
    return 2 * q.shape[0] * q.shape[1] * (q.shape[2] + 1) * len(key)


FLOPS: Flops = {
    torch.ops.longstraw.latent_forward: OpFlops("chosen_rows", _forward_flops),
    torch.ops.longstraw.latent_backward: OpFlops("chosen_rows", _backward_flops),
    torch.ops.longstraw.latent_best_rows: OpFlops("scores", _scores_flops),
}


def _compacted(rows: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Return room for the rows of some queries without those that are none, and for their numbers."""
    return rows.new_empty(queries, rows.shape[1], dtype=torch.int32), rows.new_empty(queries, dtype=torch.int32)


def _check_buffers(buffers: Buffers, dtype: torch.dtype) -> None:
    for buffer in buffers:
        if buffer is not None and (buffer.dtype != dtype or (buffer.numel() and buffer.stride(-1) != 1)):
            raise TypeError(
                f"a gradient buffer is {buffer.dtype} of strides {buffer.stride()}; it must be {dtype} in rows"
            )


def _check(q: Tensor) -> None:
    """Raise TypeError unless ``q`` has a dtype that the kernels take."""
    if q.dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise TypeError(f"the CUDA kernels of latent attention take queries in {names}, not {q.dtype}")


def inner_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rowwise(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x`` as the kernels read it: its last dimension contiguous, in ``dtype`` (None: its own).

    Retained rows may be kept in another dtype than queries have; then a layer's are copied.
    """
    x = x if dtype is None else x.to(dtype)
    return x if x.stride(-1) == 1 or not x.numel() else x.contiguous()


def power(size: int) -> int:
    """Round up to a power of two that tensor cores take."""
    return max(1 << (size - 1).bit_length(), 16)
