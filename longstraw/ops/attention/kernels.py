"""The Triton kernels of the gradient of attention to retained rows; ``fused`` has the operator that launches them.

Each program owns the rows it adds to, so the sum does not depend on the order of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


def rows_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_q: Tensor,
    key_grad: Tensor | None,
    value_grad: Tensor | None,
    scale: float,
) -> None:
    """Fill ``delta`` and ``grad_q``, add into the buffers; arguments as in ``fused``. Allocates nothing."""
    heads, count, width = q.shape
    rows, groups, _ = k.shape
    common = {"D": width, "BLOCK_D": max(16, triton.next_power_of_2(width))}
    queries, keys = _blocks(common["BLOCK_D"], q.element_size())
    tokens = (count, grad.stride(0), grad.stride(1), q.stride(0), q.stride(1))
    _delta_kernel[(triton.cdiv(count, 64), heads)](
        grad, out, delta, count, *grad.stride()[:2], *out.stride()[:2], BLOCK_T=64, **common, num_warps=8
    )
    shared = (*tokens, lse.stride(0), rows, *k.stride()[:2], *v.stride()[:2], scale)
    _query_grad_kernel[(triton.cdiv(count, queries["BLOCK_T"]), heads)](
        grad, q, k, v, lse, delta, grad_q, *shared, *grad_q.stride()[:2], REPEATS=heads // groups, **common, **queries
    )
    if key_grad is not None and value_grad is not None and len(key_grad):
        covered = len(key_grad)
        _row_grad_kernel[(triton.cdiv(covered, keys["BLOCK_S"]), groups)](
            *(grad, q, k[rows - covered :], v[rows - covered :], lse, delta, key_grad, value_grad),
            *(*tokens, lse.stride(0), covered, *k.stride()[:2], *v.stride()[:2], scale),
            *(*key_grad.stride()[:2], *value_grad.stride()[:2]),
            REPEATS=heads // groups,
            **common,
            **keys,
        )


def _blocks(width: int, size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the configurations of the kernels for queries and for rows, by a row's width and an element's bytes."""
    if size == 2 and width > 128:
        # of rows at least 64 are wanted for wgmma; more queries at a time would spill registers
        return (
            {"BLOCK_T": 64, "BLOCK_S": 32, "num_warps": 8, "num_stages": 2},
            {"BLOCK_T": 32, "BLOCK_S": 64, "num_warps": 8, "num_stages": 2},
        )
    tile = 64 if size == 2 else 32 if width <= 64 else 16  # float32 products run outside the tensor cores
    both = {"BLOCK_T": tile, "BLOCK_S": tile, "num_warps": 4, "num_stages": 2}
    return both, both


@triton.jit
def _load_tile(base, at, count, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows ``at`` of ``count``, zeros beyond. Offsets are 64 bits wide: 2.1M rows of 4 x 256 pass 2^31."""
    columns = tl.arange(0, BLOCK_D)
    mask = at[:, None] < count
    if BLOCK_D != D:
        mask = mask & (columns[None, :] < D)
    return tl.load(base + at.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _load_weights_of(lse, at, count):
    """Load log-sum-exps in base 2, such that exp2(score - value) is the weight: 0 beyond ``count`` and for -inf."""
    value = tl.load(lse + at, mask=at < count, other=float("inf"))
    return tl.where(value == float("-inf"), float("inf"), value) * LOG2E


@triton.jit
def _delta_kernel(
    Grad, Out, Delta, count, grad_h, grad_t, out_h, out_t, BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """delta_t = sum_d grad_td out_td, in float32."""
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    grad = _load_tile(Grad + head * grad_h, at, count, grad_t, D, BLOCK_D).to(tl.float32)
    out = _load_tile(Out + head * out_h, at, count, out_t, D, BLOCK_D).to(tl.float32)
    tl.store(Delta + head * count + at, tl.sum(grad * out, 1), mask=at < count)


@triton.jit
def _query_grad_kernel(
    Grad,
    Q,
    K,
    V,
    Lse,
    Delta,
    GradQ,
    count,
    grad_h,
    grad_t,
    q_h,
    q_t,
    lse_h,
    rows,
    k_s,
    k_n,
    v_s,
    v_n,
    scale,
    grad_q_h,
    grad_q_t,
    REPEATS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A block of queries of one head against all rows: dq = scale sum_s p (dp - delta) k."""
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    group = head // REPEATS
    q = _load_tile(Q + head * q_h, at, count, q_t, D, BLOCK_D)
    grad = _load_tile(Grad + head * grad_h, at, count, grad_t, D, BLOCK_D)
    lse = _load_weights_of(Lse + head * lse_h, at, count)
    delta = tl.load(Delta + head * count + at, mask=at < count, other=0.0)
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for start in range(0, rows, BLOCK_S):
        row = start + tl.arange(0, BLOCK_S)
        k = _load_tile(K + group * k_n, row, rows, k_s, D, BLOCK_D)
        v = _load_tile(V + group * v_n, row, rows, v_s, D, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        # beyond the rows the score is 0, perhaps far above a very negative log-sum-exp: infinity times 0 is NaN
        weights = tl.where(row[None, :] < rows, tl.exp2(scores - lse[:, None]), 0.0)
        grad_weights = tl.dot(grad, tl.trans(v), input_precision="ieee")
        grad_scores = weights * (grad_weights - delta[:, None])
        total = tl.dot(grad_scores.to(k.dtype), k, total, input_precision="ieee")
    columns = tl.arange(0, BLOCK_D)
    target = GradQ + head * grad_q_h + at.to(tl.int64)[:, None] * grad_q_t + columns[None, :]
    tl.store(target, total * scale, mask=(at[:, None] < count) & (columns[None, :] < D))


@triton.jit
def _row_grad_kernel(
    Grad,
    Q,
    K,
    V,
    Lse,
    Delta,
    GradK,
    GradV,
    count,
    grad_h,
    grad_t,
    q_h,
    q_t,
    lse_h,
    rows,
    k_s,
    k_n,
    v_s,
    v_n,
    scale,
    grad_k_s,
    grad_k_n,
    grad_v_s,
    grad_v_n,
    REPEATS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A block of rows of one key/value head against all queries of its heads, added to what the buffers hold.

    Scores are made transposed, rows first: an accumulator is never transposed on its way into a product.
    """
    row = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    group = tl.program_id(1).to(tl.int64)
    k = _load_tile(K + group * k_n, row, rows, k_s, D, BLOCK_D)
    v = _load_tile(V + group * v_n, row, rows, v_s, D, BLOCK_D)
    total_k = tl.zeros([BLOCK_S, BLOCK_D], dtype=tl.float32)
    total_v = tl.zeros([BLOCK_S, BLOCK_D], dtype=tl.float32)
    for repeat in range(REPEATS):
        head = group * REPEATS + repeat
        for start in range(0, count, BLOCK_T):
            at = start + tl.arange(0, BLOCK_T)
            q = _load_tile(Q + head * q_h, at, count, q_t, D, BLOCK_D)
            grad = _load_tile(Grad + head * grad_h, at, count, grad_t, D, BLOCK_D)
            lse = _load_weights_of(Lse + head * lse_h, at, count)
            delta = tl.load(Delta + head * count + at, mask=at < count, other=0.0)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
            weights = tl.exp2(scores - lse[None, :])
            total_v = tl.dot(weights.to(grad.dtype), grad, total_v, input_precision="ieee")
            grad_weights = tl.dot(v, tl.trans(grad), input_precision="ieee")
            grad_scores = weights * (grad_weights - delta[None, :])
            total_k = tl.dot(grad_scores.to(q.dtype), q, total_k, input_precision="ieee")
    columns = tl.arange(0, BLOCK_D)
    mask = (row[:, None] < rows) & (columns[None, :] < D)
    target_k = GradK + group * grad_k_n + row.to(tl.int64)[:, None] * grad_k_s + columns[None, :]
    target_v = GradV + group * grad_v_n + row.to(tl.int64)[:, None] * grad_v_s + columns[None, :]
    tl.store(target_k, total_k * scale + tl.load(target_k, mask=mask, other=0.0), mask=mask)
    tl.store(target_v, total_v + tl.load(target_v, mask=mask, other=0.0), mask=mask)
