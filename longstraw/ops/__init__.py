"""Pure tensor functions. Which implementation of each is taken is chosen once, when a model is built."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from longstraw.ops.attention import PARTS, AttentionParts
from longstraw.ops.context import Context, Local
from longstraw.ops.conv import reference as conv
from longstraw.ops.delta import reference as delta
from longstraw.ops.latent import LATENT, LatentOps
from longstraw.ops.logprob import LOGITS, TokenLogits
from longstraw.ops.moe import MOE, MoeOps

Linear = Callable[..., tuple[Tensor, Tensor]]  # output and state


class Ops(NamedTuple):
    """The implementations that a model's layers call."""

    attention: AttentionParts
    delta: Linear
    conv: Linear
    logits: TokenLogits
    latent: LatentOps
    moe: MoeOps
    context: Context  # what joins positions, through the ops above


BACKENDS = tuple(PARTS)


def choose_ops(backend: str) -> Ops:
    """Return the ops of a backend: ``cpu``; ``reference``, which runs on any device; ``cuda``, fused kernels.

    Triton and fla are imported for ``cuda`` alone. Without fla, or where its gradients are wrong, the plain references
    of its ops stand in, and the log says so once.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "cuda" and importlib.util.find_spec("triton") is None:
        raise ValueError("backend='cuda' needs Triton: pip install 'longstraw[gpu]'")
    attention, latent, moe, logits = PARTS[backend], LatentOps(LATENT[backend]), MOE[backend], LOGITS[backend]
    scan, convolution = _fused_linear() if backend == "cuda" else (delta.gated_delta_rule, conv.causal_conv)
    return Ops(
        attention=attention,
        delta=scan,
        conv=convolution,
        logits=logits,
        latent=latent,
        moe=moe,
        context=Local(attention, latent, moe, logits),
    )


def _fused_linear() -> tuple[Linear, Linear]:
    """Return the gated delta rule and the convolution from fla, as far as they can be had."""
    if importlib.util.find_spec("fla") is None:
        _say_once("fla is not installed (pip install 'longstraw[gpu]'): delta layers run on their plain reference")
        return delta.gated_delta_rule, conv.causal_conv
    from longstraw.ops.conv import kernels as fused_conv
    from longstraw.ops.delta import kernels as fused_delta

    wrong = fused_delta.wrong_here()
    if wrong is None:
        return fused_delta.gated_delta_rule, fused_conv.causal_conv
    _say_once(f"{wrong}: the gated delta rule runs on its plain reference")
    return delta.gated_delta_rule, fused_conv.causal_conv


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)
