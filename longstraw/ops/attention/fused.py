"""Softmax attention on CUDA: PyTorch's flash operators, and a Triton kernel for the gradient of retained rows.

The flash backward makes a key and a value gradient for every query head, 6.4 GB a layer at 262,144 rows, so it is used
for new rows only. Gradients of retained rows are accumulated in float32 straight into the state's buffers: no tensor of
the prompt's size is made. Triton is imported when a kernel is launched: on fake tensors all of this runs without it.

N key/value heads, R query heads for each, H = N R, T queries, S rows, G rows with a gradient, D width of a head.
bfloat16 and float16 use these kernels; other types the plain reference, except for retained rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstraw.ops.attention import reference
from longstraw.ops.attention.reference import Buffers
from longstraw.ops.fake_workspace import scratch
from longstraw.ops.flops import Flops, OpFlops, pairs
from longstraw.ops.host_offload import QueryGradients
from longstraw.ops.kernel_workspace import flash_backward_bytes, flash_forward_bytes
from longstraw.ops.lazy_module import LazyModule

FLASH_TYPES = (torch.bfloat16, torch.float16)
kernels = LazyModule("longstraw.ops.attention.kernels")


def operand_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which tensors of ``dtype`` are handed over: their own where tensor cores take it."""
    return dtype if dtype in FLASH_TYPES else torch.promote_types(dtype, torch.float32)


def takes_all_rows(dtype: torch.dtype) -> bool:
    """Return whether all retained rows are evaluated at once: if no copy of them is needed."""
    return dtype in FLASH_TYPES


def part_forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend as ``reference.part_forward`` does; the output is at least float32. A causal part is square."""
    if q.dtype not in FLASH_TYPES:
        return reference.part_forward(q, k, v, causal=causal, scale=scale)
    _check_square(q, k, causal)
    heads, repeats, count, width = q.shape
    if not count:  # the operator would fail to launch
        return q.to(torch.float32), q.new_empty(q.shape[:-1], dtype=torch.float32)
    inside = scratch(q, flash_forward_bytes(heads * repeats, count, len(k), width))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _by_tokens(q), k[None], v[None], None, None, count, len(k), 0.0, causal, False, scale=scale
    )
    del inside
    return _by_heads(out, heads).to(torch.float32), lse.reshape(heads, repeats, count)


def part_backward(
    queries: QueryGradients, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients as ``reference.part_backward`` does, that of the queries at least float32."""
    grad, q, out, lse = queries
    if q.dtype not in FLASH_TYPES:
        return reference.part_backward(queries, k, v, causal=causal, scale=scale)
    _check_square(q, k, causal)
    heads, repeats, count, width = q.shape
    if not count:
        return q.to(torch.float32), torch.zeros_like(k), torch.zeros_like(v)
    unused = q.new_empty(2, dtype=torch.uint64)  # random state of the unused dropout
    inside = scratch(q, flash_backward_bytes(heads, repeats, count, len(k), width, q.element_size()))
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


def rows_backward(queries: QueryGradients, k: Tensor, v: Tensor, buffers: Buffers, *, scale: float) -> Tensor:
    """Return the gradient of the queries as ``reference.rows_backward`` does, in float32.

    Both buffers are given, or none. Takes bfloat16, float16 and float32; buffers and log-sum-exp are float32.
    """
    grad, q, out, lse = queries
    key_grad, value_grad = buffers
    if q.dtype == torch.float64:
        return reference.rows_backward(queries, k, v, buffers, scale=scale)
    if (key_grad is None) != (value_grad is None):
        raise ValueError("give a buffer for both gradients, of keys and of values, or for none")
    if any(x is not None and x.stride(-1) != 1 for x in (k, v, key_grad, value_grad)):
        raise ValueError("the elements of a row must be contiguous")
    flat, lse = [x.to(q.dtype).flatten(0, 1) for x in (grad, q, out)], lse.flatten(0, 1).contiguous()
    delta = torch.empty_like(lse)
    grad_q = _attention_rows_backward(flat[0], flat[1], k, v, flat[2], lse, delta, key_grad, value_grad, scale)
    return grad_q.view(q.shape)


@torch.library.custom_op(
    "longstraw::attention_rows_backward", mutates_args=("delta", "key_grad", "value_grad"), device_types=("cpu", "cuda")
)
def _attention_rows_backward(
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
    grad_q = torch.empty_like(q, dtype=torch.float32)
    if q.shape[1]:
        kernels.rows_backward(grad, q, k, v, out, lse, delta, grad_q, key_grad, value_grad, scale)
    return grad_q


@_attention_rows_backward.register_fake
def _(grad: Tensor, q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, dtype=torch.float32)


def _flash_forward_flops(q: Tensor, k: Tensor, *rest: Any) -> int:
    _, count, heads, width = q.shape
    return 4 * heads * width * pairs(count, k.shape[1], rest[6])


def _flash_backward_flops(grad: Tensor, q: Tensor, k: Tensor, *rest: Any) -> int:
    _, count, heads, width = q.shape
    return 10 * heads * width * pairs(count, k.shape[1], rest[8])


def _rows_backward_flops(grad: Tensor, q: Tensor, k: Tensor, *rest: Any) -> int:
    """Three products for the gradient of queries; four for that of rows, which makes scores and weights again."""
    heads, count, width = q.shape
    graded = rest[4]
    return 2 * heads * count * width * (3 * len(k) + 4 * (0 if graded is None else len(graded)))


FLOPS: Flops = {  # PyTorch's counter takes the flash operators' tensors as [batch, head, position]: they are not
    torch.ops.aten._flash_attention_forward: OpFlops("attention", _flash_forward_flops),
    torch.ops.aten._flash_attention_backward: OpFlops("attention_backward", _flash_backward_flops),
    torch.ops.longstraw.attention_rows_backward: OpFlops("attention_backward", _rows_backward_flops),
}


def _check_square(q: Tensor, k: Tensor, causal: bool) -> None:
    if causal and q.shape[2] != len(k):
        raise ValueError(f"a causal part has as many queries as rows, not {q.shape[2]} and {len(k)}")


def _by_tokens(x: Tensor) -> Tensor:
    """View [N, R, T, D] as [1, T, H, D]."""
    return x.flatten(0, 1).transpose(0, 1)[None]


def _by_heads(x: Tensor, heads: int) -> Tensor:
    """View [1, T, H, D] as [N, R, T, D]."""
    return x[0].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
