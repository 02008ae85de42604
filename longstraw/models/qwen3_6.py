"""Qwen3.6: three Gated DeltaNet layers to one of gated full attention, SwiGLU, zero-centred norms.

Names and shapes of parameters are those of transformers' ``Qwen3_5ForCausalLM``.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from longstraw.config.architectures import Qwen36Config
from longstraw.config.architectures.qwen3_6 import HybridConfig
from longstraw.layers.attention import GatedAttention
from longstraw.layers.delta import DepthwiseWeight, GatedDeltaNet
from longstraw.layers.feedforward import GatedMixture, SwiGLU
from longstraw.layers.norm import GatedRMSNorm, ZeroCentredRMSNorm
from longstraw.models.decoder import Block, Decoder, Mixer
from longstraw.ops import Ops


class HybridBlock(Block):
    """One layer; its mixer is ``linear_attn`` or ``self_attn`` by the layer's type."""

    def __init__(self, config: HybridConfig, layer_type: str, mlp: SwiGLU | GatedMixture, ops: Ops):
        super().__init__()
        self.input_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        if layer_type == "full_attention":
            self.self_attn = GatedAttention(config, ops)
        else:
            self.linear_attn = GatedDeltaNet(config, ops)
        self.post_attention_layernorm = ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    @property
    def mixer(self) -> Mixer:
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn


def build(config: Qwen36Config, ops: Ops) -> Decoder:
    """Return the model with parameters allocated on the current default device but not initialised."""
    width, inner = config.hidden_size, config.intermediate_size
    blocks = [HybridBlock(config, kind, SwiGLU(width, inner), ops) for kind in config.layer_types]
    return Decoder(config, ops, blocks, ZeroCentredRMSNorm(config.hidden_size, config.rms_norm_eps))


@torch.no_grad()
def initialise(module: nn.Module, deviation: float, generator: torch.Generator) -> None:
    """Draw what ``module`` itself holds: normal matrices, and decays as published for Gated DeltaNet.

    Decay rates are uniform in [1, 16], time steps log-uniform in [0.001, 0.1]: exp(g) from 0.2 to 0.999, so some
    heads remember over a thousand positions.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.normal_(0, deviation, generator=generator)
    elif isinstance(module, ZeroCentredRMSNorm):
        module.weight.zero_()
    elif isinstance(module, GatedRMSNorm):
        module.weight.fill_(1)
    elif isinstance(module, DepthwiseWeight):
        bound = module.weight.shape[-1] ** -0.5
        module.weight.uniform_(-bound, bound, generator=generator)
    elif isinstance(module, GatedDeltaNet):
        module.A_log.uniform_(1, 16, generator=generator).log_()
        step = module.dt_bias.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
        module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
