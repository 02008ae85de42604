"""Pure tensor functions, and ``choose_ops``, which selects their implementations when a model is built."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from longstraw.ops.attention import PARTS, AttentionParts
from longstraw.ops.conv import fused as fused_conv
from longstraw.ops.conv import reference as conv
from longstraw.ops.delta import fused as fused_delta
from longstraw.ops.delta import reference as delta
from longstraw.ops.latent import LATENT, LatentOps
from longstraw.ops.logprob import LOGITS, TokenLogits
from longstraw.ops.moe import MOE, MoeOps
from longstraw.ops.sequence_ops import Context, Local

Linear = Callable[..., tuple[Tensor, Tensor]]  # output and state


class Ops(NamedTuple):
    """The implementations that a model's layers call."""

    attention: AttentionParts
    delta: Linear
    conv: Linear
    logits: TokenLogits
    latent: LatentOps
    moe: MoeOps
    context: Context  # the operations over several positions, through the ops above


BACKENDS = tuple(PARTS)


def choose_ops(backend: str, *, fake: bool = False) -> Ops:
    """Return the ops of a backend: ``cpu``; ``reference``, which runs on any device; ``cuda``, fused kernels.

    ``cuda`` needs Triton. If fla is missing, or its gradients are wrong on this GPU, the references replace its ops and
    the log says so once. With ``fake`` no kernel will run, so neither is required. Triton and fla are imported when
    their first kernel runs; only the check of fla's gradients imports it here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    fused = backend == "cuda"
    if fused and not fake and importlib.util.find_spec("triton") is None:
        raise ValueError("backend='cuda' needs Triton: pip install 'longstraw[gpu]'")
    attention, latent, moe, logits = PARTS[backend], LatentOps(LATENT[backend]), MOE[backend], LOGITS[backend]
    scan, convolution = delta.gated_delta_rule, conv.causal_conv
    if fused and (fake or _fla_is_here()):
        convolution = fused_conv.causal_conv
        if fake or _delta_is_right():
            scan = fused_delta.gated_delta_rule
    return Ops(
        attention=attention,
        delta=scan,
        conv=convolution,
        logits=logits,
        latent=latent,
        moe=moe,
        context=Local(attention, latent, moe, logits),
    )


def _fla_is_here() -> bool:
    if importlib.util.find_spec("fla") is not None:
        return True
    _say_once("fla is not installed (pip install 'longstraw[gpu]'): delta layers run on their plain reference")
    return False


def _delta_is_right() -> bool:
    """Return whether fla's gradients of the gated delta rule are right on this machine."""
    from longstraw.ops.delta.kernels import wrong_here

    wrong = wrong_here()
    if wrong is not None:
        _say_once(f"{wrong}: the gated delta rule runs on its plain reference")
    return wrong is None


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)
