"""Triton kernels that choose the best rows for each query; same results as ``reference``.

A score costs thousands of operations and a few bytes, so each is computed once, in tiles of queries and keys that a
workspace holds. A second kernel, one program a query, chooses out of the best so far and a tile's scores.

T new positions, K chosen rows a query, I index heads, D index width, S index keys of a part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longstraw.ops.latent.fused import power
from longstraw.ops.latent.kernels.common import INNER, load

SCORE_BLOCK = 128  # queries, and keys, that one program scores; never by T, on which no score may depend


@triton.jit(do_not_specialize=["start", "keys", "queries"])
def _score_kernel(
    Q, WEIGHTS, KEY, SEEN, SCORES, q_t, q_i, w_t, key_stride, score_stride, queries, start, keys,
    SCALE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One program: scores of BLOCK_S keys for BLOCK_T queries, summed by heads in one order wherever a tile begins."""
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    asked = t < queries
    first = tl.program_id(1) * BLOCK_S
    seen = tl.load(SEEN + t, mask=asked, other=0)
    if start + first < tl.max(seen, 0):
        s = first + tl.arange(0, BLOCK_S)
        d = tl.arange(0, BLOCK_D)
        rows = (start + s).to(tl.int64)
        inside = (s < keys)[None, :] & (d < D)[:, None]
        key = tl.load(KEY + rows[None, :] * key_stride + d[:, None], mask=inside, other=0.0)
        scores = tl.zeros([BLOCK_T, BLOCK_S], INNER)
        for head in range(HEADS):
            q = load(Q + t[:, None] * q_t + head * q_i + d[None, :], asked, d, D, BLOCK_D)
            weight = tl.load(WEIGHTS + t * w_t + head, mask=asked, other=0.0).to(INNER)
            product = tl.dot(q, key, input_precision="ieee", out_dtype=INNER)
            scores += tl.maximum(product * SCALE, 0.0) * weight[:, None]
        tl.store(SCORES + t[:, None] * score_stride + s[None, :], scores, mask=asked[:, None] & (s < keys)[None, :])


@triton.jit
def _ordered(x, WHOLE: tl.constexpr, BITS: tl.constexpr):
    """Return integers in the same order as the floats ``x``; applied twice it returns the floats' bits."""
    return x ^ ((x >> (BITS - 1)) & tl.full((), 2 ** (BITS - 1) - 1, WHOLE))


@triton.jit(do_not_specialize=["start", "keys"])
def _choose_kernel(
    SCORES, POSITIONS, SEEN, BEST, ROWS, score_stride, start, keys,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One program: the best rows of one query, out of its best so far and of newly scored, later ones.

    The lowest score kept is found bit by bit from the highest on; of equal scores those of the first positions stay.
    """
    t = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(SEEN + t) - start, keys)
    if seen > 0:
        at = tl.arange(0, BLOCK)
        old = at < COUNT
        new = (at >= COUNT) & (at - COUNT < seen)
        scores = tl.load(
            tl.where(old, BEST + t * COUNT + at, SCORES + t * score_stride + at - COUNT), mask=old | new, other=0.0
        )
        scores = tl.where(scores == 0.0, 0.0, scores)  # -0 ties with 0
        order = _ordered(scores.to(WHOLE, bitcast=True), WHOLE, BITS)
        lowest = tl.full((), -(2 ** (BITS - 1)), WHOLE)
        order = tl.where(old | new, order, lowest)
        last = tl.min(tl.where(old, order, tl.full((), 2 ** (BITS - 1) - 1, WHOLE)), 0)
        if tl.max(tl.where(new, order, lowest), 0) > last:  # later ones lose ties
            zero = tl.full((), 0, WHOLE)
            bound = tl.where(tl.sum((order >= zero).to(tl.int32), 0) >= COUNT, zero, lowest)
            bit = tl.full((), 2 ** (BITS - 2), WHOLE)
            for _ in range(BITS - 1):
                higher = bound | bit
                bound = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= COUNT, higher, bound)
                bit = bit >> 1
            above = order > bound
            equal = order == bound
            passed = tl.cumsum(tl.where(above, 1, tl.where(equal, 65536, 0)), 0)  # two counts in one
            spare = COUNT - tl.sum(above.to(tl.int32), 0)
            place = (passed & 65535) + tl.minimum(passed >> 16, spare) - 1
            stays = above | (equal & ((passed >> 16) <= spare))
            rows = tl.load(tl.where(old, ROWS + t * COUNT + at, POSITIONS + start + at - COUNT), mask=stays)
            tl.debug_barrier()  # all is read before the first is written
            scores = _ordered(order, WHOLE, BITS).to(BEST.dtype.element_ty, bitcast=True)
            tl.store(BEST + t * COUNT + place, scores, mask=stays)
            tl.store(ROWS + t * COUNT + place, rows, mask=stays)


def best_rows(
    q: Tensor, weights: Tensor, key: Tensor, positions: Tensor, seen: Tensor, scores: Tensor, best: Tensor,
    rows: Tensor, scale: float,
) -> None:  # fmt: skip
    """Put the best rows over those already there and ``key`` [S, D] into ``best`` and ``rows``, through ``scores``."""
    whole, bits = (tl.int64, 64) if best.dtype == torch.float64 else (tl.int32, 32)
    queries, keys, count = *scores.shape, best.shape[1]
    block = SCORE_BLOCK if q.element_size() == 2 else 32
    for t in range(0, len(q) if keys else 0, queries or 1):
        tile = slice(t, min(t + queries, len(q)))
        number = tile.stop - t
        for start in range(0, len(key), keys):
            size = min(keys, len(key) - start)
            _score_kernel[(triton.cdiv(number, block), triton.cdiv(size, block))](
                q[tile], weights[tile], key, seen[tile], scores,
                q.stride(0), q.stride(1), weights.stride(0), key.stride(0), scores.stride(0), number, start, size,
                SCALE=scale, HEADS=q.shape[1], D=q.shape[2], BLOCK_T=block, BLOCK_S=block, BLOCK_D=power(q.shape[2]),
                INNER=INNER[best.dtype], num_warps=8, num_stages=2,
            )  # fmt: skip
            _choose_kernel[(number,)](
                scores, positions, seen[tile], best[tile], rows[tile], scores.stride(0), start, size,
                COUNT=count, BLOCK=power(count + keys), WHOLE=whole, BITS=bits, num_warps=8,
            )  # fmt: skip
