"""Llama, Qwen2 and Qwen3: full attention with grouped queries in every layer, SwiGLU.

Names and shapes of parameters are those of transformers' ``LlamaForCausalLM``, ``Qwen2ForCausalLM`` and
``Qwen3ForCausalLM``, depending on the biases and the q/k norm.
"""

from __future__ import annotations

import torch
from torch import nn

from longstraw.config.architectures import LlamaConfig
from longstraw.layers.attention import Attention
from longstraw.layers.feedforward import SwiGLU
from longstraw.layers.norm import RMSNorm
from longstraw.models.decoder import Block, Decoder, Mixer
from longstraw.ops import Ops


class LlamaBlock(Block):
    """One layer."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(
            config,
            ops,
            norm=RMSNorm if config.qk_norm else None,
            qkv_bias=config.attention_bias or config.qkv_bias,
            output_bias=config.attention_bias,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    @property
    def mixer(self) -> Mixer:
        return self.self_attn


def build(config: LlamaConfig, ops: Ops) -> Decoder:
    """Return the model with parameters allocated on the current default device but not initialised."""
    blocks = [LlamaBlock(config, ops) for _ in range(config.num_hidden_layers)]
    return Decoder(config, ops, blocks, RMSNorm(config.hidden_size, config.rms_norm_eps))


@torch.no_grad()
def initialise(module: nn.Module, deviation: float, generator: torch.Generator) -> None:
    """Draw what ``module`` itself holds: normal matrices, biases at 0, norms at 1."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.normal_(0, deviation, generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
    elif isinstance(module, RMSNorm):
        module.weight.fill_(1)
