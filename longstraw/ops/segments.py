"""Operations that carry a state from position to position, for segments that each start from the same state.

The segments of a batch are evaluated side by side, as further heads or channels. Batches follow one another, and each
is evaluated again in the backward, so what is held beyond inputs and outputs is bounded by one batch.

T positions of all segments, A key heads, B value heads, K and V widths, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.chunk import Chunk, SideBySide

Linear = Callable[..., tuple[Tensor, Tensor | None]]  # output and state; no state is after several segments


def convolve(conv: Linear, chunk: Chunk, x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, None]:
    """Return ``conv(x, weight, tail)`` [T, C] of each segment of ``x`` [T, C]; each starts from ``tail`` [W-1, C]."""

    def run(number: int, x: Tensor, weight: Tensor, tail: Tensor) -> Tensor:
        return conv(x, weight.repeat(number, 1), tail.repeat(1, number))[0]

    return _BySegments.apply(run, chunk.batches, 1, x, weight, tail), None


def scan(delta: Linear, chunk: Chunk, *inputs: Tensor) -> tuple[Tensor, None]:
    """Return the outputs [T, B, V] of ``delta(*inputs)`` for each segment; each starts from the state [B, K, V].

    ``inputs`` are those of ``delta.reference.gated_delta_rule``, the state the last of them.
    """

    def run(number: int, *inputs: Tensor) -> Tensor:
        *rows, state = inputs
        return delta(*rows, state.repeat(number, 1, 1))[0]

    return _BySegments.apply(run, chunk.batches, len(inputs) - 1, *inputs), None


class _BySegments(torch.autograd.Function):
    """Evaluate ``run(n, *rows, *shared)`` a batch at a time; the rows [T, ...] are a position's, the rest all share."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], batches: list[SideBySide], number: int, *inputs: Tensor
    ) -> Tensor:
        rows, shared = inputs[:number], inputs[number:]
        out: Tensor | None = None
        for batch in batches:
            part = run(batch.number, *map(batch.fold, rows), *shared)
            if out is None:
                heads = part.shape[1] // batch.number
                out = part.new_empty(len(rows[0]), heads, *part.shape[2:])
            batch.unfold(part, out)
            del part
        assert out is not None  # segments are packed where there are several
        ctx.save_for_backward(*inputs)
        ctx.run, ctx.batches, ctx.number = run, batches, number
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, number = ctx.saved_tensors, ctx.number
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        wide = [torch.promote_types(x.dtype, torch.float32) for x in inputs]
        grads = {
            i: torch.empty_like(inputs[i]) if i < number else torch.zeros_like(inputs[i], dtype=wide[i]) for i in wanted
        }
        for batch in ctx.batches:
            leaves = [batch.fold(x) if i < number else x.detach() for i, x in enumerate(inputs)]
            for i in wanted:
                leaves[i].requires_grad_()
            with torch.enable_grad():
                part = ctx.run(batch.number, *leaves)
            found = torch.autograd.grad(part, [leaves[i] for i in wanted], batch.fold(grad))
            for i, one in zip(wanted, found, strict=True):
                if i < number:
                    batch.unfold(one, grads[i])
                else:
                    grads[i] += one
            del leaves, part, found, one  # gone before the next batch's are made
        return None, None, None, *(grads[i].to(x.dtype) if i in grads else None for i, x in enumerate(inputs))
