"""The gated delta rule for one position of each of n branches: the formula of ``reference``, nothing padded.

A key heads, B value heads, K and V widths.
"""

from __future__ import annotations

from torch import Tensor

from longstraw.ops.delta.reference import normalise


def gated_delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [n, B, V] in ``v``'s dtype and the new states [n, B, K, V]; the given ones stay.

    ``q``, ``k`` [n, A, K] and ``v`` [n, B, V], ``g`` and ``beta`` [n, B] as in ``reference.gated_delta_rule``, one
    position of each branch; ``state`` [n, B, K, V]. Its twin is ``reference.recurrent``, a branch at a time.
    """
    inner, repeats = state.dtype, v.shape[1] // k.shape[1]
    q, k = (normalise(x).to(inner).repeat_interleave(repeats, 1) for x in (q, k))
    state = state * g.to(inner).exp()[..., None, None]
    change = beta.to(inner).unsqueeze(-1) * (v.to(inner) - (k.unsqueeze(-2) @ state).squeeze(-2))
    state.flatten(0, 1).baddbmm_(k.flatten(0, 1).unsqueeze(-1), change.flatten(0, 1).unsqueeze(-2))
    out = (q.unsqueeze(-2) @ state).squeeze(-2) * k.shape[-1] ** -0.5
    return out.to(v.dtype), state
