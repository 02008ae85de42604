"""Multi-head latent attention in absorbed form over rows that an indexer chose (DeepSeek-V3.2, arXiv 2512.02556).

Keys and values are never expanded: all heads read the same latent rows. The gradient of retained rows is added straight
into the state's gradient buffers: no tensor of the prompt's size is made.

T new positions, P retained ones, K chosen rows a query, H heads, C latent width, R width of the rotary key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.host_offload import QueryGradients, RetainedRows, Rows, device_grad_buffers, whole
from longstraw.ops.kept import once
from longstraw.ops.latent import fused, reference
from longstraw.ops.latent.reference import Buffers
from longstraw.ops.latent.reference import Rows as RowPair


class LatentKernels(Protocol):
    """What a backend provides; see ``reference``. All tensors are on the device."""

    def attend_forward(
        self, q: Tensor, past: RowPair, new: RowPair, rows: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def attend_backward(
        self, queries: QueryGradients, past: RowPair, new: RowPair, rows: Tensor, past_grads: Buffers, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def select_rows(
        self, q: Tensor, weights: Tensor, past_key: Tensor, key: Tensor, count: int, *, scale: float
    ) -> Tensor: ...

    def best_rows(
        self,
        q: Tensor,
        weights: Tensor,
        parts: Sequence[tuple[Tensor, Tensor]],
        queried: Tensor,
        count: int,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...


class LatentOps:
    """A backend's operations; a layer's retained rows in host memory are copied to the device as a whole.

    Which rows a query reads is known only in the kernel, so they cannot be copied in tiles.
    """

    def __init__(self, kernels: LatentKernels):
        self._kernels = kernels

    def attend_forward(
        self, q: Tensor, past: RetainedRows, new: RowPair, rows: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._kernels.attend_forward(q, _pair(whole(past.rows, q.dtype)), new, rows, scale=scale)

    def attend_backward(
        self, queries: QueryGradients, past: RetainedRows, new: RowPair, rows: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        here = _pair(whole(past.rows, queries.q.dtype, backward=True))
        with device_grad_buffers(past.grads) as (latent, rope_key):
            return self._kernels.attend_backward(queries, here, new, rows, (latent, rope_key), scale=scale)

    def select_rows(
        self, q: Tensor, weights: Tensor, past_key: Rows, key: Tensor, count: int, *, scale: float
    ) -> Tensor:
        return self._kernels.select_rows(q, weights, whole([past_key], q.dtype)[0], key, count, scale=scale)

    def best_rows(
        self,
        q: Tensor,
        weights: Tensor,
        parts: Sequence[tuple[Rows, Tensor]],
        queried: Tensor,
        count: int,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        keys = whole([part[0] for part in parts], q.dtype)
        here = [(key, positions) for key, (_, positions) in zip(keys, parts, strict=True)]
        return self._kernels.best_rows(q, weights, here, queried, count, scale=scale)


def _pair(rows: Sequence[Tensor]) -> RowPair:
    latent, rope_key = rows
    return latent, rope_key


LATENT: dict[str, LatentKernels] = {"reference": reference, "cpu": reference, "cuda": fused}
REFERENCE = LatentOps(reference)


def attend_rows(
    q: Tensor,
    new: RowPair,
    rows: Tensor,
    past: RetainedRows,
    *,
    scale: float,
    ops: LatentOps = REFERENCE,
) -> tuple[Tensor, Tensor]:
    """Return the output [T, H, C] of ``q`` [T, H, C + R] over its chosen rows, and their log-sum-exp [T, H].

    ``new`` are the latents [T, C] and rotary keys [T, R] of these positions, ``past`` the retained ones [P, .],
    ``rows`` [T, K] the choice over (past | new) with -1 for none, which the chooser makes causal. The log-sum-exp has
    no gradient.
    """
    return _ChosenRows.apply(q, *new, rows, past, scale, ops)


class _ChosenRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        rope_key: Tensor,
        rows: Tensor,
        past: RetainedRows,
        scale: float,
        ops: LatentOps,
    ) -> tuple[Tensor, Tensor]:
        def evaluate() -> tuple[Tensor, Tensor]:
            return ops.attend_forward(q, past, (latent, rope_key), rows, scale=scale)

        out, lse = once(past.kept, "attention", evaluate)
        ctx.save_for_backward(q, latent, rope_key, rows, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.past, ctx.scale, ctx.ops = past, scale, ops
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, rope_key, rows, out, lse = ctx.saved_tensors
        queries = QueryGradients(grad, q, out, lse)
        gradients = ctx.ops.attend_backward(queries, ctx.past, (latent, rope_key), rows, scale=ctx.scale)
        return *gradients, None, None, None, None
