"""Qwen3.6 with a mixture of experts: the mixers of ``qwen3_6``, each before routed experts and a gated shared one.

Names and shapes of parameters are those of transformers' ``Qwen3_5MoeForCausalLM``.
"""

from __future__ import annotations

import torch
from torch import nn

from longstraw.config.architectures import Qwen36MoeConfig
from longstraw.layers.feedforward import Experts, GatedMixture, SoftmaxRouter
from longstraw.layers.norm import ZeroCentredRMSNorm
from longstraw.models import qwen3_6
from longstraw.models.decoder import Decoder
from longstraw.ops import Ops


def build(config: Qwen36MoeConfig, ops: Ops) -> Decoder:
    """Return the model with parameters allocated on the current default device but not initialised."""
    blocks = [qwen3_6.HybridBlock(config, kind, GatedMixture(config, ops), ops) for kind in config.layer_types]
    return Decoder(config, ops, blocks, ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps))


@torch.no_grad()
def initialise(module: nn.Module, deviation: float, generator: torch.Generator) -> None:
    """Draw what ``module`` itself holds: routers and experts normal, all else as ``qwen3_6``."""
    if isinstance(module, SoftmaxRouter):
        module.weight.normal_(0, deviation, generator=generator)
    elif isinstance(module, Experts):
        module.gate_up_proj.normal_(0, deviation, generator=generator)
        module.down_proj.normal_(0, deviation, generator=generator)
    else:
        qwen3_6.initialise(module, deviation, generator)
