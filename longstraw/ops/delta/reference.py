"""The gated delta rule in chunked form, with initial and final state, in plain PyTorch.

For each value head, with a state S [K, V] that starts at the given one (Yang et al. 2024, arXiv 2412.06464):

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T        o_t = S_t^T q_t

Within an inner chunk the products of (I - beta k k^T) are written by one triangular solve (the WY form); chunks hand
the state on. Segments of several chunks are recomputed one by one in the backward, so that memory beyond the inputs
is bounded by a segment and one state per segment.

T positions, A key heads, B value heads, R = B / A value heads per key head, K and V widths, C positions an inner chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longstraw.config import inner_chunk

SEGMENT = 512  # positions whose intermediates are alive at a time


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [T, B, V] in ``v``'s dtype and the final state [B, K, V].

    ``q``, ``k`` [T, A, K] are normalised here (L2, epsilon 1e-6 under the root; queries scaled by K^-0.5); ``v``
    [T, B, V]; ``g`` [T, B] the log decay, at most 0; ``beta`` [T, B]; ``state`` [B, K, V] in the inner dtype, at least
    float32. Value head j reads key head j // R. Gradients for every input, the state's included.
    """
    return _GatedDeltaRule.apply(q, k, v, g, beta, state)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        *rows, state = inputs
        out, borders = torch.empty_like(rows[2]), []
        for start in range(0, len(out), SEGMENT):
            borders.append(state)
            segment = [x[start : start + SEGMENT] for x in rows]
            out[start : start + SEGMENT], state = _segment(*[*segment, state])
        ctx.save_for_backward(*rows, *borders)
        # an output may not be an input: without rows the state passes through
        return out, state.clone() if state is inputs[-1] else state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, *borders = ctx.saved_tensors
        rows = (q, k, v, g, beta)
        grads = [torch.empty_like(x) for x in rows]
        for i, border in reversed(list(enumerate(borders))):
            piece = slice(i * SEGMENT, (i + 1) * SEGMENT)
            leaves = [x.detach().requires_grad_() for x in (*(x[piece] for x in rows), border)]
            with torch.enable_grad():
                outputs = _segment(*leaves)
            *row_grads, grad_state = torch.autograd.grad(outputs, leaves, (grad_out[piece], grad_state))
            for grad, part in zip(grads, row_grads, strict=True):
                grad[piece] = part
            del leaves, outputs, row_grads, part  # gone before the next segment's are made
        return (*grads, grad_state)


def _segment(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Evaluate one segment; arguments as in ``gated_delta_rule``."""
    count, width, dtype = len(v), state.shape[1], v.dtype
    inner, key_heads, size = state.dtype, k.shape[1], inner_chunk(width)

    def chunks(x: Tensor, at: int) -> Tensor:
        """[T, heads, ...] -> [n, A, R, C, ...]; zeros beyond the end leave the state as it is (k = beta = g = 0)."""
        x = F.pad(x.to(inner), (0, 0) * (x.dim() - 1) + (0, -count % size))
        x = x.unflatten(0, (-1, size)).unflatten(2, (key_heads, -1))
        return x.movedim(1, at)

    q, k, v, g, beta = chunks(normalise(q), 3), chunks(normalise(k), 3), chunks(v, 3), chunks(g, 3), chunks(beta, 3)
    q = q * width**-0.5
    total = g.cumsum(-1)  # log decay from the chunk's start
    after = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(after, -torch.inf).exp()
    beta = beta.unsqueeze(-1)
    grown = total.exp().unsqueeze(-1)
    lower = (k @ k.mT) * decay * beta  # its diagonal is not read: the solve is unitriangular
    right = torch.cat([v * beta, k * (beta * grown)], -1)
    values, keys = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True).split(
        [v.shape[-1], width], -1
    )
    del lower, right, v, beta  # where no graph holds them, they need not outlive their use
    scores = (q @ k.mT) * decay
    del decay
    queries, last = q * grown, total[..., -1:]
    keys_left = k * (last - total).exp().unsqueeze(-1)
    del q, k, grown
    kept = last.exp().unsqueeze(-1)

    state = state.unflatten(0, (key_heads, -1))
    out = []
    # unbind, not indexing: the backward of n slices would be n full-size tensors
    for values_n, keys_n, queries_n, scores_n, keys_left_n, kept_n in zip(
        *(x.unbind(0) for x in (values, keys, queries, scores, keys_left, kept)), strict=True
    ):
        new = values_n - keys_n @ state
        out.append(queries_n @ state + scores_n @ new)
        state = state * kept_n + keys_left_n.mT @ new
    result = torch.stack(out).movedim(3, 1).flatten(0, 1).flatten(1, 2)[:count]
    return result.to(dtype), state.flatten(0, 1)


plain = _segment  # the whole rule in one graph, which holds all that is in between


def rule_flops(key_heads: int, value_heads: int, keys: int, values: int) -> int:
    """Return the FLOPs of one position in chunked form; ``keys`` and ``values`` are the heads' widths.

    By key heads k k^T and q k^T; by value heads the triangular solve of K + V columns (half of the square), states read
    by keys and by queries, what a chunk adds of its own values, and the state's update.
    """
    chunk = inner_chunk(keys)
    by_key_head = 2 * 2 * chunk * keys
    by_value_head = chunk * (keys + values) + 2 * 2 * keys * values + 2 * chunk * values + 2 * keys * values
    return key_heads * by_key_head + value_heads * by_value_head


def normalise(x: Tensor) -> Tensor:
    """Return queries or keys ``x`` [..., K] of length 1, in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same, one position after the other by the formula above: the oracle of tests."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (normalise(x).repeat_interleave(repeats, 1) for x in (q, k))
    out = []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        change = beta[t, :, None] * (v[t] - torch.einsum("bkv,bk->bv", state, k[t]))
        state = state + torch.einsum("bk,bv->bkv", k[t], change)
        out.append(torch.einsum("bkv,bk->bv", state, q[t]) * k.shape[-1] ** -0.5)
    return torch.stack(out), state
