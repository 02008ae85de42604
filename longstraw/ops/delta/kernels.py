"""The gated delta rule by flash-linear-attention's Triton kernels; shapes and meaning as in ``reference``.

The backward evaluates the chunks' inner products anew: only the inputs are kept. T positions, A key heads, B value
heads, K and V widths.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstraw.ops.delta import reference
from longstraw.ops.scratch import scratch

INNER_CHUNK = 64
HOPPER = 9
WRONG_FROM, RIGHT_FROM = (3, 4, 0), (3, 7, 1)  # Triton on Hopper: fla's issue 640


def wrong_here() -> str | None:
    """Return why gradients would be wrong on this machine's GPU, or None. fla itself refuses to compute them then."""
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3])
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER
    if hopper and WRONG_FROM <= version < RIGHT_FROM:
        return f"gradients of the gated delta rule are wrong with triton {triton.__version__} on Hopper; 3.7.1 is right"
    return None


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state as ``reference.gated_delta_rule`` does; float64 and no positions go to it."""
    if v.dtype == torch.float64 or len(v) == 0:
        return reference.gated_delta_rule(q, k, v, g, beta, state)
    return _GatedDeltaRule.apply(*(x.contiguous() for x in (q, k, v, g, beta, state)))


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        inside = scratch(inputs[2], _forward_bytes(*_sizes(inputs[1], inputs[2])))
        results = gated_delta_forward(*inputs)
        del inside
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        inside = scratch(inputs[2], _backward_bytes(*_sizes(inputs[1], inputs[2])))
        results = gated_delta_backward(*inputs, grad_out.contiguous(), grad_state.contiguous())
        del inside
        return results


@torch.library.custom_op("longstraw::gated_delta_forward", mutates_args=(), device_types=("cpu", "cuda"))
def gated_delta_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, B, V] and the final state [B, K, V]."""
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


@gated_delta_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(state)


@torch.library.custom_op("longstraw::gated_delta_backward", mutates_args=(), device_types=("cpu", "cuda"))
def gated_delta_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, grad_out: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the six inputs of the forward."""
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


@gated_delta_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, grad_out: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, g, beta, state = (torch.empty_like(x) for x in (q, k, v, g, beta, state))
    return q, k, v, g, beta, state


def _sizes(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return T, A, B, K, V and the bytes of an element."""
    return (*k.shape[:2], v.shape[1], k.shape[2], v.shape[2], v.element_size())


def _kept_bytes(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Normed queries and keys with their norms, summed decay, inverse, w, u, new values, and the chunks' states."""
    normed = 2 * count * keys * (key * size + 4)
    rows = count * values * (4 + (INNER_CHUNK + key + 2 * value) * size)
    return normed + rows + -(-count // INNER_CHUNK) * values * key * value * size


def _forward_bytes(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Return what the forward allocates beside its results: all of it is alive when the outputs are made."""
    return _kept_bytes(count, keys, values, key, value, size) - count * keys * 4  # the queries' norms are gone by then


def _backward_bytes(count: int, keys: int, values: int, key: int, value: int, size: int) -> int:
    """Return what is alive beside the results at the backward's peak: where the gradients of w and u are taken up."""
    states = -(-count // INNER_CHUNK) * values * key * value * size
    rows = count * values * ((2 * key + value) * size + 4)
    summed = count * keys * key * size if keys != values else 0
    return _kept_bytes(count, keys, values, key, value, size) + states + rows + summed
