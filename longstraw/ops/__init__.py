"""Pure tensor functions. Which implementation of each is taken is chosen once, when a model is built."""

from __future__ import annotations

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


class Ops(NamedTuple):
    """The implementations that a model's layers call."""

    attention: AttentionParts
    delta: Callable[..., tuple[Tensor, Tensor]]
    conv: Callable[..., tuple[Tensor, Tensor]]
    logits: TokenLogits
    latent: LatentOps
    moe: MoeOps
    context: Context  # what joins positions, through the ops above


BACKENDS = tuple(PARTS)


def choose_ops(backend: str) -> Ops:
    """Return the ops of a backend: ``cpu``, or ``reference``, which runs on any device."""
    if backend not in PARTS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    attention, latent, moe, logits = PARTS[backend], LATENT[backend], MOE[backend], LOGITS[backend]
    return Ops(
        attention=attention,
        delta=delta.gated_delta_rule,
        conv=conv.causal_conv,
        logits=logits,
        latent=latent,
        moe=moe,
        context=Local(attention, latent, moe, logits),
    )
