"""Log-probability and entropy of chosen tokens in Triton: products with the vocabulary never leave a program.

The forward reduces tiles of logits where they are made. The backward makes the logits' gradient once more in tiles of
vocabulary, which two plain matrix products take up; it exists for one tile at a time.

T positions, d width, V vocabulary. float64 goes through the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.logprob import reference

SPLIT = 4096  # columns that one program of the forward reduces
GRADIENT_TILE = 8192  # columns whose gradient exists at a time


def token_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``reference.token_logits`` does, in float32."""
    if hidden.dtype == torch.float64:
        return reference.token_logits(hidden, weight, targets)
    return _TokenLogits.apply(hidden, weight, targets)


class _TokenLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the loss seldom reads the entropy
        hidden, weight = _rows_contiguous(hidden), _rows_contiguous(weight).to(hidden.dtype)
        parts = hidden.new_empty(4, triton.cdiv(len(weight), SPLIT), len(hidden), dtype=torch.float32)
        reduce_logits(hidden, weight, targets, parts, SPLIT)
        highest, total, weighted, chosen = parts
        shares = (highest - highest.amax(0)).exp_()
        total = (total * shares).sum(0)
        lse, mean = highest.amax(0) + total.log(), (weighted * shares).sum(0) / total
        ctx.save_for_backward(hidden, weight, targets, lse, mean)
        return chosen.sum(0), lse, mean

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logit: Tensor | None, grad_lse: Tensor | None, grad_mean: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, targets, lse, mean = ctx.saved_tensors
        grads = [torch.zeros_like(lse) if x is None else x.contiguous() for x in (grad_logit, grad_lse)]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        tile = hidden.new_empty(len(hidden), min(GRADIENT_TILE, len(weight)))
        for start in range(0, len(weight), GRADIENT_TILE):
            rows = weight[start : start + GRADIENT_TILE]
            grad = tile[:, : len(rows)]
            logit_gradients(hidden, rows, targets, lse, mean, *grads, grad_mean, start, grad)
            if grad_hidden is not None:
                grad_hidden += grad @ rows
            if grad_weight is not None:
                torch.mm(grad.T, hidden, out=grad_weight[start : start + GRADIENT_TILE])
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None


@torch.library.custom_op("longstraw::reduce_logits", mutates_args=("parts",), device_types=("cpu", "cuda"))
def reduce_logits(hidden: Tensor, weight: Tensor, targets: Tensor, parts: Tensor, split: int) -> None:
    """Fill ``parts`` [4, V / split, T] with, of each split: highest logit, sum of exp(logit - highest), sum of logits
    so weighted, and the target's logit or 0."""
    count, width = hidden.shape
    if count == 0:
        return
    blocks = _blocks(hidden.element_size())
    _reduce_kernel[(triton.cdiv(count, blocks["BLOCK_T"]), parts.shape[1])](
        *(hidden, weight, targets, parts, count, len(weight), width, hidden.stride(0), weight.stride(0)),
        *parts.stride()[:2],
        SPLIT=split,
        **blocks,
    )


@reduce_logits.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, parts: Tensor, split: int) -> None:
    return None


@torch.library.custom_op("longstraw::logit_gradients", mutates_args=("out",), device_types=("cpu", "cuda"))
def logit_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    mean: Tensor,
    grad_logit: Tensor,
    grad_lse: Tensor,
    grad_mean: Tensor | None,
    start: int,
    out: Tensor,
) -> None:
    """Fill ``out`` [T, v] with the gradient of the logits of ``weight`` [v, d], the vocabulary's rows from ``start``.

    ``lse`` and ``mean`` [T] are those of the whole vocabulary, and so are the gradients [T] of its three results.
    """
    count, width = hidden.shape
    if count == 0:
        return
    blocks = _blocks(hidden.element_size())
    _gradient_kernel[(triton.cdiv(count, blocks["BLOCK_T"]), triton.cdiv(len(weight), blocks["BLOCK_V"]))](
        *(hidden, weight, targets, lse, mean, grad_logit, grad_lse, lse if grad_mean is None else grad_mean, out),
        *(start, count, len(weight), width, hidden.stride(0), weight.stride(0), out.stride(0)),
        WITH_MEAN=grad_mean is not None,
        **blocks,
    )


@logit_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    mean: Tensor,
    grad_logit: Tensor,
    grad_lse: Tensor,
    grad_mean: Tensor | None,
    start: int,
    out: Tensor,
) -> None:
    return None


def _blocks(size: int) -> dict[str, int]:
    """Return the kernels' configuration by the bytes of an element."""
    if size == 2:
        return {"BLOCK_T": 128, "BLOCK_V": 128, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_T": 32, "BLOCK_V": 32, "BLOCK_D": 32, "num_warps": 4, "num_stages": 2}


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _logits(
    Hidden,
    Weight,
    at,
    row,
    count,
    rows,
    width,
    hidden_t,
    weight_v,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the logits of positions ``at`` and vocabulary rows ``row``, 0 beyond either."""
    hidden = Hidden + at.to(tl.int64)[:, None] * hidden_t
    weight = Weight + row.to(tl.int64)[None, :] * weight_v
    total = tl.zeros([BLOCK_T, BLOCK_V], dtype=tl.float32)
    for start in range(0, width, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        x = tl.load(hidden + column[None, :], mask=(at[:, None] < count) & (column[None, :] < width), other=0.0)
        w = tl.load(weight + column[:, None], mask=(row[None, :] < rows) & (column[:, None] < width), other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def _reduce_kernel(
    Hidden,
    Weight,
    Targets,
    Parts,
    count,
    rows,
    width,
    hidden_t,
    weight_v,
    parts_kind,
    parts_split,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A block of positions against one split of the vocabulary."""
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * SPLIT
    target = tl.load(Targets + at, mask=at < count, other=-1)
    highest = tl.full([BLOCK_T], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_T], dtype=tl.float32)
    weighted = tl.zeros([BLOCK_T], dtype=tl.float32)
    chosen = tl.zeros([BLOCK_T], dtype=tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, rows), BLOCK_V):
        row = start + tl.arange(0, BLOCK_V)
        logits = _logits(Hidden, Weight, at, row, count, rows, width, hidden_t, weight_v, BLOCK_T, BLOCK_V, BLOCK_D)
        inside = row[None, :] < tl.minimum(first + SPLIT, rows)
        raised = tl.maximum(highest, tl.max(tl.where(inside, logits, float("-inf")), 1))
        mass = tl.where(inside, tl.exp(logits - raised[:, None]), 0.0)
        decay = tl.exp(highest - raised)
        total = total * decay + tl.sum(mass, 1)
        weighted = weighted * decay + tl.sum(mass * logits, 1)
        chosen += tl.sum(tl.where(inside & (row[None, :] == target[:, None]), logits, 0.0), 1)
        highest = raised
    out = Parts + tl.program_id(1).to(tl.int64) * parts_split + at
    mask = at < count
    tl.store(out, highest, mask=mask)
    tl.store(out + parts_kind, total, mask=mask)
    tl.store(out + 2 * parts_kind, weighted, mask=mask)
    tl.store(out + 3 * parts_kind, chosen, mask=mask)


@triton.jit
def _gradient_kernel(
    Hidden,
    Weight,
    Targets,
    Lse,
    Mean,
    GradLogit,
    GradLse,
    GradMean,
    Out,
    first,
    count,
    rows,
    width,
    hidden_t,
    weight_v,
    out_t,
    WITH_MEAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Per logit z_j of probability p_j: 1[j = target] of the logit, p_j of the log-sum-exp, p_j (1 + z_j - mean)."""
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = at < count
    logits = _logits(Hidden, Weight, at, row, count, rows, width, hidden_t, weight_v, BLOCK_T, BLOCK_V, BLOCK_D)
    share = tl.load(GradLse + at, mask=mask, other=0.0)[:, None]
    if WITH_MEAN:
        mean = tl.load(Mean + at, mask=mask, other=0.0)
        share += tl.load(GradMean + at, mask=mask, other=0.0)[:, None] * (1 + logits - mean[:, None])
    grad = tl.exp(logits - tl.load(Lse + at, mask=mask, other=0.0)[:, None]) * share
    target = tl.load(Targets + at, mask=mask, other=-1)
    own = tl.load(GradLogit + at, mask=mask, other=0.0)
    grad += tl.where((first + row)[None, :] == target[:, None], own[:, None], 0.0)
    out = Out + at.to(tl.int64)[:, None] * out_t + row[None, :]
    tl.store(out, grad.to(Out.dtype.element_ty), mask=mask[:, None] & (row[None, :] < rows))
