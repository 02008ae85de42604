"""The gated delta rule for one position of each of n branches: the formula of ``reference``, nothing padded.

A key heads, B value heads, K and V widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.ops.delta.reference import normalise


def gated_delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [n, B, V] in ``v``'s dtype and the new states [n, B, K, V]; the given ones stay.

    ``q``, ``k`` [n, A, K] and ``v`` [n, B, V], ``g`` and ``beta`` [n, B] as in ``reference.gated_delta_rule``, one
    position of each branch; ``state`` [n, B, K, V]. Its twin is ``reference.recurrent``, a branch at a time.
    """
    inner, repeats = state.dtype, v.shape[1] // k.shape[1]
    read = normalise(torch.stack([q, k], 2)).to(inner)  # [n, A, 2, K]: the state is read once for both
    if repeats > 1:
        read = read.repeat_interleave(repeats, 1)
    state = state * g.to(inner).exp()[..., None, None]
    by_query, by_key = (read @ state).unbind(2)
    change = beta.to(inner).unsqueeze(-1) * (v.to(inner) - by_key)
    keys = read[:, :, 1]
    state.flatten(0, 1).baddbmm_(keys.flatten(0, 1).unsqueeze(-1), change.flatten(0, 1).unsqueeze(-2))
    out = torch.addcmul(by_query, (read[:, :, 0] * keys).sum(-1, keepdim=True), change) * k.shape[-1] ** -0.5
    return out.to(v.dtype), state
