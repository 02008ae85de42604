"""Softmax attention on CUDA: PyTorch's flash operators, and a Triton kernel for the gradient of retained rows.

The flash backward makes a key and a value gradient for every query head, 6.4 GB a layer at 262,144 rows; so it serves
the new rows. Gradients of retained rows are accumulated in float32 straight into the state's buffers: each program owns
its rows, nothing of the prompt's size is made, and the sum does not depend on the order of programs.

N key/value heads, R query heads for each, H = N R, T queries, S rows, G rows with a gradient, D width of a head.
bfloat16 and float16 are taken as they are; other types go through the plain reference, except for retained rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longstraw.ops.attention import reference
from longstraw.ops.scratch import scratch

LOG2E = tl.constexpr(1.4426950408889634)
FLASH_TYPES = (torch.bfloat16, torch.float16)


def operand_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors of ``dtype`` are handed over: their own where tensor cores take it."""
    return dtype if dtype in FLASH_TYPES else torch.promote_types(dtype, torch.float32)


def part_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend as ``reference.part_forward`` does; the output is at least float32. A causal part is square."""
    if q.dtype not in FLASH_TYPES:
        return reference.part_forward(q, k, v, causal=causal, scale=scale)
    _check_square(q, k, causal)
    heads, repeats, count, _ = q.shape
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _by_tokens(q), k[None], v[None], None, None, count, len(k), 0.0, causal, False, scale=scale
    )
    return _by_heads(out, heads).to(torch.float32), lse.reshape(heads, repeats, count)


def part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as ``reference.part_backward`` does, that of ``q`` at least float32."""
    if q.dtype not in FLASH_TYPES:
        return reference.part_backward(grad, q, k, v, out, lse, causal=causal, scale=scale)
    _check_square(q, k, causal)
    heads, repeats, count, width = q.shape
    unused = q.new_empty(2, dtype=torch.uint64)  # the state of a dropout that is not there
    inside = scratch(q, _flash_backward_bytes(heads, repeats, count, len(k), width, q.element_size()))
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        _by_tokens(grad.to(q.dtype)),
        _by_tokens(q),
        k[None],
        v[None],
        _by_tokens(out.to(q.dtype)),
        lse.reshape(1, heads * repeats, count),
        *(None, None, count, len(k), 0.0, causal, unused, unused),
        scale=scale,
    )
    del inside
    return _by_heads(grad_q, heads).to(torch.float32), grad_k[0], grad_v[0]


def rows_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_grad: Tensor | None,
    value_grad: Tensor | None,
    *,
    scale: float,
) -> Tensor:
    """Return the gradient of ``q`` as ``reference.rows_backward`` does, in float32; both buffers are given, or none.

    Takes bfloat16, float16 and float32; buffers and ``lse`` are float32.
    """
    if q.dtype == torch.float64:
        return reference.rows_backward(grad, q, k, v, out, lse, key_grad, value_grad, scale=scale)
    if (key_grad is None) != (value_grad is None):
        raise ValueError("give a buffer for both gradients, of keys and of values, or for none")
    if any(x is not None and x.stride(-1) != 1 for x in (k, v, key_grad, value_grad)):
        raise ValueError("the elements of a row must be contiguous")
    flat, lse = [x.to(q.dtype).flatten(0, 1) for x in (grad, q, out)], lse.flatten(0, 1).contiguous()
    delta = torch.empty_like(lse)
    grad_q = attention_rows_backward(flat[0], flat[1], k, v, flat[2], lse, delta, key_grad, value_grad, scale)
    return grad_q.view(q.shape)


@torch.library.custom_op(
    "longstraw::attention_rows_backward", mutates_args=("delta", "key_grad", "value_grad"), device_types=("cpu", "cuda")
)
def attention_rows_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    key_grad: Tensor | None,
    value_grad: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the gradient [H, T, D] of ``q``; fill ``delta`` [H, T], add into the buffers [G, N, D].

    ``grad``, ``q``, ``out`` [H, T, D], ``lse`` [H, T], ``k``, ``v`` [S, N, D].
    """
    heads, count, width = q.shape
    rows, groups, _ = k.shape
    grad_q = torch.empty_like(q, dtype=torch.float32)
    if count == 0:
        return grad_q
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
    return grad_q


@attention_rows_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    key_grad: Tensor | None,
    value_grad: Tensor | None,
    scale: float,
) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


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


def _flash_backward_bytes(heads: int, repeats: int, count: int, rows: int, width: int, size: int) -> int:
    """Return what PyTorch's flash backward allocates beside its results.

    Contiguous copies of the output and its gradient, the float32 accumulator of the query gradient and the row sums
    (both rounded up), and, with grouped queries, a key and a value gradient for every query head.
    """
    rounded_count, rounded_width = -(-count // 128) * 128, -(-width // 32) * 32
    copies = 2 * heads * repeats * count * width * size
    sums = heads * repeats * rounded_count * (rounded_width + 1) * 4
    expanded = 2 * heads * repeats * rows * width * size if repeats > 1 else 0
    return copies + sums + expanded


def _check_square(q: Tensor, k: Tensor, causal: bool) -> None:
    if causal and q.shape[2] != len(k):
        raise ValueError(f"a causal part has as many queries as rows, not {q.shape[2]} and {len(k)}")


def _by_tokens(x: Tensor) -> Tensor:
    """View [N, R, T, D] as [1, T, H, D]."""
    return x.flatten(0, 1).transpose(0, 1)[None]


def _by_heads(x: Tensor, heads: int) -> Tensor:
    """View [1, T, H, D] as [N, R, T, D]."""
    return x[0].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
