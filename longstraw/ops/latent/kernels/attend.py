"""Triton kernels of attention over chosen latent rows; same results as ``reference``.

All heads of a query read the same rows, so a program has many heads of one query, and products use tensor cores. The
backward has two kernels. The first makes the gradient of queries and leaves each weight and its gradient in a
workspace; the second turns those, row by row, into sums that it adds into the buffers.

T new positions, P retained ones, K chosen rows a query, H heads, C latent width, R width of the rotary key.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from longstraw.ops.latent.fused import inner_dtype, power
from longstraw.ops.latent.kernels.common import INNER, load, store

LOG2E = tl.constexpr(1.4426950408889634)
ROW_BYTES = 1_152  # of a row in shared memory, for which blocks of 64 heads and 64 rows are laid out
ROW_BLOCK = 64  # rows whose gradient one program adds


@triton.jit
def _row_pointers(PAST, NEW, rows, past_stride, new_stride, retained):
    """Where rows (int64) over (past | new) begin."""
    return tl.where(rows < retained, PAST + rows * past_stride, NEW + (rows - retained) * new_stride)


@triton.jit
def _compact_kernel(ROWS, CHOSEN, NUMBER, stride, count, BLOCK: tl.constexpr):
    """Move a query's rows to the front and count them: what is -1 costs nothing afterwards."""
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    rows = tl.load(ROWS + t * stride + at, mask=at < count, other=-1)
    there = (rows >= 0).to(tl.int32)
    tl.store(CHOSEN + t * count + tl.cumsum(there, 0) - 1, rows.to(tl.int32), mask=there > 0)
    tl.store(NUMBER + t, tl.sum(there, 0))


@triton.jit(do_not_specialize=["retained"])
def _forward_kernel(
    Q, PAST_LATENT, PAST_ROPE, NEW_LATENT, NEW_ROPE, CHOSEN, NUMBER, OUT, LSE,
    q_t, q_h, past_latent_stride, past_rope_stride, new_latent_stride, new_rope_stride, count, retained,
    SCALE: tl.constexpr, H: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One program: the heads [BLOCK_H] of one query, over its rows in blocks of BLOCK_N."""
    t = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = heads < H
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    query = Q + t * q_t + heads[:, None] * q_h
    q_latent = load(query + c[None, :], head_ok, c, C, BLOCK_C)
    q_rope = load(query + C + r[None, :], head_ok, r, R, BLOCK_R)
    out = tl.zeros([BLOCK_H, BLOCK_C], INNER)
    highest = tl.full([BLOCK_H], float("-inf"), INNER)
    total = tl.zeros([BLOCK_H], INNER)
    number = tl.load(NUMBER + t)
    for start in range(0, number, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        there = at < number
        rows = tl.load(CHOSEN + t * count + at, mask=there, other=0).to(tl.int64)
        latent_at = _row_pointers(PAST_LATENT, NEW_LATENT, rows, past_latent_stride, new_latent_stride, retained)
        rope_at = _row_pointers(PAST_ROPE, NEW_ROPE, rows, past_rope_stride, new_rope_stride, retained)
        latent = load(latent_at[:, None] + c[None, :], there, c, C, BLOCK_C)
        rope = load(rope_at[:, None] + r[None, :], there, r, R, BLOCK_R)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee", out_dtype=INNER)
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee", out_dtype=INNER) * SCALE
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))  # finite: a block has a row
        weights = tl.exp2((scores - higher[:, None]) * LOG2E)
        shrink = tl.exp2((highest - higher) * LOG2E)
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(latent.dtype), latent, out * shrink[:, None], input_precision="ieee", out_dtype=INNER)
        highest = higher
    some = number > 0
    out = out / tl.where(some, total, 1.0)[:, None]
    store(OUT + (t * H + heads[:, None]) * C + c[None, :], out, head_ok, c, C, BLOCK_C)
    tl.store(LSE + t * H + heads, tl.where(some, highest + tl.log(tl.where(some, total, 1.0)), highest), mask=head_ok)


@triton.jit(do_not_specialize=["retained", "first"])
def _query_gradient_kernel(
    GRAD, Q, PAST_LATENT, PAST_ROPE, NEW_LATENT, NEW_ROPE, CHOSEN, NUMBER, OUT, LSE, GRAD_Q, WEIGHTS, GRAD_SCORES,
    g_t, g_h, q_t, q_h, o_t, o_h, past_latent_stride, past_rope_stride, new_latent_stride, new_rope_stride,
    count, retained, first,
    SCALE: tl.constexpr, H: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of one query's heads [BLOCK_H]; leaves weights and gradients of scores [t, K, H]."""
    local = tl.program_id(0).to(tl.int64)
    t = local + first
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = heads < H
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    grad = load(GRAD + t * g_t + heads[:, None] * g_h + c[None, :], head_ok, c, C, BLOCK_C)
    out = load(OUT + t * o_t + heads[:, None] * o_h + c[None, :], head_ok, c, C, BLOCK_C)
    delta = tl.sum(grad.to(INNER) * out.to(INNER), 1)
    lse = tl.load(LSE + t * H + heads, mask=head_ok, other=0.0)
    query = Q + t * q_t + heads[:, None] * q_h
    q_latent = load(query + c[None, :], head_ok, c, C, BLOCK_C)
    q_rope = load(query + C + r[None, :], head_ok, r, R, BLOCK_R)
    grad_latent = tl.zeros([BLOCK_H, BLOCK_C], INNER)
    grad_rope = tl.zeros([BLOCK_H, BLOCK_R], INNER)
    number = tl.load(NUMBER + local)
    for start in range(0, number, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        there = at < number
        rows = tl.load(CHOSEN + local * count + at, mask=there, other=0).to(tl.int64)
        latent_at = _row_pointers(PAST_LATENT, NEW_LATENT, rows, past_latent_stride, new_latent_stride, retained)
        rope_at = _row_pointers(PAST_ROPE, NEW_ROPE, rows, past_rope_stride, new_rope_stride, retained)
        latent = load(latent_at[:, None] + c[None, :], there, c, C, BLOCK_C)
        rope = load(rope_at[:, None] + r[None, :], there, r, R, BLOCK_R)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee", out_dtype=INNER)
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee", out_dtype=INNER) * SCALE
        weights = tl.where(there[None, :], tl.exp2((scores - lse[:, None]) * LOG2E), 0.0)
        grad_weights = tl.dot(grad, tl.trans(latent), input_precision="ieee", out_dtype=INNER)
        grad_scores = (weights * (grad_weights - delta[:, None]) * SCALE).to(latent.dtype)
        kept = (local * count + at)[:, None] * H + heads[None, :]
        store(WEIGHTS + kept, tl.trans(weights.to(latent.dtype)), there, heads, H, BLOCK_H)
        store(GRAD_SCORES + kept, tl.trans(grad_scores), there, heads, H, BLOCK_H)
        grad_latent = tl.dot(grad_scores, latent, grad_latent, input_precision="ieee", out_dtype=INNER)
        grad_rope = tl.dot(grad_scores, rope, grad_rope, input_precision="ieee", out_dtype=INNER)
    grad_query = GRAD_Q + (t * H + heads[:, None]) * (C + R)
    store(grad_query + c[None, :], grad_latent, head_ok, c, C, BLOCK_C)
    store(grad_query + C + r[None, :], grad_rope, head_ok, r, R, BLOCK_R)


@triton.jit
def _add(
    NEW, PAST, rows, columns, values, past_stride, retained, kept, there, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Add ``values`` to rows of the new rows' buffer, or of that of the last ``kept`` retained ones."""
    past_row = rows - (retained - kept)
    target = tl.where(rows >= retained, NEW + (rows - retained) * WIDTH, PAST + past_row * past_stride)
    mask = (there & (past_row >= 0))[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.atomic_add(target[:, None] + columns[None, :], values, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["retained", "first", "kept_latent", "kept_rope"])
def _row_gradient_kernel(
    GRAD, Q, CHOSEN, NUMBER, WEIGHTS, GRAD_SCORES, NEW_LATENT, NEW_ROPE, PAST_LATENT, PAST_ROPE,
    g_t, g_h, q_t, q_h, past_latent_stride, past_rope_stride, count, retained, kept_latent, kept_rope, first,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One program: what one query adds to BLOCK_N rows: some columns of their latents or, the last, rotary keys."""
    local = tl.program_id(2).to(tl.int64)
    t = local + first
    number = tl.load(NUMBER + local)
    start = tl.program_id(1) * BLOCK_N
    if start < number:
        at = start + tl.arange(0, BLOCK_N)
        there = at < number
        rows = tl.load(CHOSEN + local * count + at, mask=there, other=0).to(tl.int64)
        kept = (local * count + at)[:, None] * H
        column = tl.program_id(0) * BLOCK_C
        if column < C:
            c = column + tl.arange(0, BLOCK_C)
            sums = tl.zeros([BLOCK_N, BLOCK_C], INNER)
            for head in range(0, H, BLOCK_H):
                heads = head + tl.arange(0, BLOCK_H)
                weights = load(WEIGHTS + kept + heads[None, :], there, heads, H, BLOCK_H)
                grad_scores = load(GRAD_SCORES + kept + heads[None, :], there, heads, H, BLOCK_H)
                grad = load(GRAD + t * g_t + heads[:, None] * g_h + c[None, :], heads < H, c, C, BLOCK_C)
                q = load(Q + t * q_t + heads[:, None] * q_h + c[None, :], heads < H, c, C, BLOCK_C)
                sums = tl.dot(weights, grad, sums, input_precision="ieee", out_dtype=INNER)
                sums = tl.dot(grad_scores, q, sums, input_precision="ieee", out_dtype=INNER)
            _add(NEW_LATENT, PAST_LATENT, rows, c, sums, past_latent_stride, retained, kept_latent, there, C, BLOCK_C)
        else:
            r = tl.arange(0, BLOCK_R)
            turned = tl.zeros([BLOCK_N, BLOCK_R], INNER)
            for rope_head in range(0, H, BLOCK_H):
                rope_heads = rope_head + tl.arange(0, BLOCK_H)
                rope_scores = load(GRAD_SCORES + kept + rope_heads[None, :], there, rope_heads, H, BLOCK_H)
                q_rope = load(Q + t * q_t + rope_heads[:, None] * q_h + C + r[None, :], rope_heads < H, r, R, BLOCK_R)
                turned = tl.dot(rope_scores, q_rope, turned, input_precision="ieee", out_dtype=INNER)
            _add(NEW_ROPE, PAST_ROPE, rows, r, turned, past_rope_stride, retained, kept_rope, there, R, BLOCK_R)


def attend_forward(
    q: Tensor, past_latent: Tensor, past_rope: Tensor, latent: Tensor, rope: Tensor, rows: Tensor,
    chosen: Tensor, number: Tensor, out: Tensor, lse: Tensor, scale: float,
) -> None:  # fmt: skip
    """Fill ``out`` and ``lse``, through ``chosen`` and ``number``, as many queries at a time as those are for."""
    count, shape = rows.shape[1], _shape(q, latent, rope)
    for first in range(0, len(q), max(len(chosen), 1)):
        queries = min(len(chosen), len(q) - first)
        _compact_kernel[(queries,)](rows[first:], chosen, number, rows.stride(0), count, BLOCK=power(count))
        _forward_kernel[(queries, triton.cdiv(shape["H"], shape["BLOCK_H"]))](
            q[first:], past_latent, past_rope, latent, rope, chosen, number, out[first:], lse[first:], *q.stride()[:2],
            past_latent.stride(0), past_rope.stride(0), latent.stride(0), rope.stride(0), count, len(past_latent),
            SCALE=scale, BLOCK_N=_block(shape, q, 64), **shape, num_warps=8, num_stages=2,
        )  # fmt: skip


def attend_backward(
    grad: Tensor, q: Tensor, past_latent: Tensor, past_rope: Tensor, latent: Tensor, rope: Tensor, rows: Tensor,
    chosen: Tensor, number: Tensor, out: Tensor, lse: Tensor, grad_q: Tensor, grad_latent: Tensor, grad_rope: Tensor,
    past_grad_latent: Tensor | None, past_grad_rope: Tensor | None, weights: Tensor, grad_scores: Tensor, scale: float,
) -> None:  # fmt: skip
    """Fill ``grad_q``, add into the other gradients, through the workspaces, as many queries at a time as they hold."""
    count, shape = rows.shape[1], _shape(q, latent, rope)
    buffers = [past_grad_latent, past_grad_rope]
    kept = [0 if buffer is None else len(buffer) for buffer in buffers]
    targets = [new if old is None else old for old, new in zip(buffers, (grad_latent, grad_rope), strict=True)]
    columns = min(shape["BLOCK_C"], 128)
    for first in range(0, len(q), max(len(chosen), 1)):
        queries = min(len(chosen), len(q) - first)
        _compact_kernel[(queries,)](rows[first:], chosen, number, rows.stride(0), count, BLOCK=power(count))
        _query_gradient_kernel[(queries, triton.cdiv(shape["H"], shape["BLOCK_H"]))](
            grad, q, past_latent, past_rope, latent, rope, chosen, number, out, lse, grad_q, weights, grad_scores,
            *grad.stride()[:2], *q.stride()[:2], *out.stride()[:2],
            past_latent.stride(0), past_rope.stride(0), latent.stride(0), rope.stride(0), count, len(past_latent),
            first, SCALE=scale, BLOCK_N=_block(shape, q, 32), **shape, num_warps=8, num_stages=2,
        )  # fmt: skip
        _row_gradient_kernel[(triton.cdiv(shape["C"], columns) + 1, triton.cdiv(count, ROW_BLOCK), queries)](
            grad, q, chosen, number, weights, grad_scores, grad_latent, grad_rope, *targets,
            *grad.stride()[:2], *q.stride()[:2], targets[0].stride(0), targets[1].stride(0),
            count, len(past_latent), *kept, first,
            BLOCK_N=ROW_BLOCK, **shape | {"BLOCK_C": columns}, num_warps=4, num_stages=2,
        )  # fmt: skip


def _shape(q: Tensor, latent: Tensor, rope: Tensor) -> dict[str, Any]:
    """Return the sizes that a kernel is compiled for; a program has up to 64 heads, as memory allows."""
    heads, width, rope_width = q.shape[1], latent.shape[1], rope.shape[1]
    blocks = {"BLOCK_C": power(width), "BLOCK_R": power(rope_width)}
    blocks["BLOCK_H"] = min(_block(blocks, q, 64), power(heads))
    return {"H": heads, "C": width, "R": rope_width, **blocks, "INNER": INNER[inner_dtype(q)]}


def _block(blocks: dict[str, int], q: Tensor, most: int) -> int:
    """Return ``most``, or as many rows as take its share of shared memory: half as much without tensor cores."""
    row = (blocks["BLOCK_C"] + blocks["BLOCK_R"]) * q.element_size() * (1 if q.element_size() == 2 else 2)
    return max(min(most, 2 ** ((ROW_BYTES * most // row).bit_length() - 1)), 16)
