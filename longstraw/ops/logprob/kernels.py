"""The Triton kernels of log-probability and entropy; ``fused`` has the operators that launch them.

The kernels allocate nothing. T positions, d width, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def reduce_logits(hidden: Tensor, weight: Tensor, targets: Tensor, parts: Tensor, split: int) -> None:
    """Fill ``parts``; arguments as in ``fused``."""
    count, width = hidden.shape
    blocks = _blocks(hidden.element_size())
    _reduce_kernel[(triton.cdiv(count, blocks["BLOCK_T"]), parts.shape[1])](
        *(hidden, weight, targets, parts, count, len(weight), width, hidden.stride(0), weight.stride(0)),
        *parts.stride()[:2],
        SPLIT=split,
        **blocks,
    )


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
    """Fill ``out``; arguments as in ``fused``."""
    count, width = hidden.shape
    blocks = _blocks(hidden.element_size())
    _gradient_kernel[(triton.cdiv(count, blocks["BLOCK_T"]), triton.cdiv(len(weight), blocks["BLOCK_V"]))](
        *(hidden, weight, targets, lse, mean, grad_logit, grad_lse, lse if grad_mean is None else grad_mean, out),
        *(start, count, len(weight), width, hidden.stride(0), weight.stride(0), out.stride(0)),
        WITH_MEAN=grad_mean is not None,
        **blocks,
    )


def _blocks(size: int) -> dict[str, int]:
    """Return the kernels' configuration by the bytes of an element."""
    if size == 2:
        return {"BLOCK_T": 128, "BLOCK_V": 128, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_T": 32, "BLOCK_V": 32, "BLOCK_D": 32, "num_warps": 4, "num_stages": 2}


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
