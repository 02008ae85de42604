"""Operations that carry a state from position to position, for segments that each start from the same state.

T positions of all segments, A key heads, B value heads, K and V widths, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.chunk import Chunk, SideBySide
from longstraw.ops.delta import reference

Linear = Callable[..., tuple[Tensor, Tensor | None]]  # output and state; no state is after several segments


def convolve(conv: Linear, chunk: Chunk, x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, None]:
    """Return ``conv(x, weight, tail)`` [T, C] of each segment of ``x`` [T, C]; each starts from ``tail`` [W-1, C].

    The tail stands between segments, and what it gives there is dropped.
    """
    between = tail.to(x.dtype)
    rows = [part for segment in x.split(chunk.segments) for part in (between, segment)]
    sizes = [size for length in chunk.segments for size in (len(tail), length)]
    out, _ = conv(torch.cat(rows[1:]), weight, tail)
    return torch.cat(out.split(sizes[1:])[::2]), None


def scan(delta: Linear, chunk: Chunk, *inputs: Tensor) -> tuple[Tensor, None]:
    """Return the outputs [T, B, V] of ``delta(*inputs)`` for each segment; each starts from the state [B, K, V].

    ``inputs`` are those of ``delta.reference.gated_delta_rule``, the state the last of them.
    """
    return _Scan.apply(delta, chunk.batches, *inputs), None


class _Scan(torch.autograd.Function):
    """The segments of a batch are evaluated side by side, as further heads, and again in the backward.

    So what is held beyond inputs and outputs is bounded by one batch, the states of its segments included.
    """

    @staticmethod
    def forward(ctx: Any, delta: Linear, batches: list[SideBySide], *inputs: Tensor) -> Tensor:
        *rows, state = inputs
        out = torch.empty_like(rows[2])
        for batch in batches:
            part, _ = delta(*map(batch.fold, rows), state.repeat(batch.number, 1, 1))
            batch.unfold(part, out)
            del part
        ctx.save_for_backward(*inputs)
        ctx.delta, ctx.batches = delta, batches
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *rows, state = ctx.saved_tensors
        # the reference evaluates its forward once more in its backward, to hold less than a batch's graph does
        delta: Linear = reference.plain if ctx.delta is reference.gated_delta_rule else ctx.delta
        grads, grad_state = [torch.empty_like(x) for x in rows], torch.zeros_like(state)
        for batch in ctx.batches:
            leaves = [batch.fold(x).detach().requires_grad_() for x in rows]
            start = state.repeat(batch.number, 1, 1).requires_grad_()
            with torch.enable_grad():
                part, _ = delta(*leaves, start)
            *found, found_state = torch.autograd.grad(part, [*leaves, start], batch.fold(grad))
            for one, whole in zip(found, grads, strict=True):
                batch.unfold(one, whole)
            grad_state += found_state.unflatten(0, (batch.number, -1)).sum(0)
            del leaves, start, part, found, found_state, one  # gone before the next batch's are made
        return None, None, *grads, grad_state
