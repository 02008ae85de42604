"""Call flash-linear-attention's kernels of the gated delta rule; used by the operators in ``fused``."""

from __future__ import annotations

import torch
import triton
from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from longstraw.config.model import INNER_CHUNK

HOPPER = 9
WRONG_FROM, RIGHT_FROM = (3, 4, 0), (3, 7, 1)  # Triton on Hopper: fla's issue 640


def wrong_here() -> str | None:
    """Return why gradients would be wrong on this machine's GPU, or None. fla itself refuses to compute them then."""
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER
    if hopper and WRONG_FROM <= version < RIGHT_FROM:
        return f"gradients of the gated delta rule are wrong with triton {triton.__version__} on Hopper; 3.7.1 is right"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``fused.gated_delta_forward`` does."""
    q, k, v, g, beta, state = (x[None] for x in (q, k, v, g, beta, state))
    q, _ = l2norm_fwd(q)
    k, _ = l2norm_fwd(k)
    _, out, _, final, _, _ = chunk_gated_delta_rule_fwd(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        scale=k.shape[-1] ** -0.5,
        initial_state=state,
        output_final_state=True,
        chunk_size=INNER_CHUNK,
    )
    return out[0], final[0]


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, grad_out: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what ``fused.gated_delta_backward`` does."""
    q, k, v, g, beta, state = (x[None] for x in (q, k, v, g, beta, state))
    q, q_norm = l2norm_fwd(q)
    k, k_norm = l2norm_fwd(k)
    total = chunk_local_cumsum(g, chunk_size=INNER_CHUNK, scale=RCP_LN2)
    inverse = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=total, beta=beta, chunk_size=INNER_CHUNK)[2]
    grad_q, grad_k, grad_v, grad_beta, grad_g, grad_state, _, _ = chunk_gated_delta_rule_bwd(
        q=q,
        k=k,
        v=v,
        g=total,
        beta=beta,
        A=inverse,
        scale=k.shape[-1] ** -0.5,
        initial_state=state,
        do=grad_out[None],
        dht=grad_state[None],
        chunk_size=INNER_CHUNK,
    )
    grad_q, grad_k = l2norm_bwd(q, q_norm, grad_q), l2norm_bwd(k, k_norm, grad_k)
    gradients = (grad_q.to(q), grad_k.to(k), grad_v.to(v), grad_g.to(g), grad_beta.to(beta), grad_state.to(state))
    return tuple(x[0] for x in gradients)  # type: ignore[return-value]
