"""GLM-5.2: latent attention over rows that indexers choose, shared by the layers that follow; a mixture of experts.

Names and shapes of parameters are those of transformers' ``GlmMoeDsaForCausalLM``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longstraw.config.architectures import Glm52Config
from longstraw.layers.feedforward import Experts, MixtureOfExperts, Router, SwiGLU
from longstraw.layers.latent import LatentAttention
from longstraw.layers.norm import RMSNorm
from longstraw.models.decoder import Block, Decoder, Mixer
from longstraw.ops import Ops
from longstraw.state import Past, Tensors


class Glm52Block(Block):
    """One layer. It passes the rows that its positions attend to on to the next one, which may have no indexer."""

    def __init__(self, config: Glm52Config, indexer_type: str, mlp_layer_type: str, ops: Ops):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config, indexer_type == "full", ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if mlp_layer_type == "sparse":
            self.mlp = MixtureOfExperts(config, ops)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    @property
    def mixer(self) -> Mixer:
        return self.self_attn

    def mix(self, x: Tensor, past: Past, handed: Any) -> tuple[Tensor, Tensors, Any]:
        return self.self_attn(x, past, handed)


def build(config: Glm52Config, ops: Ops) -> Decoder:
    """Return the model with parameters allocated on the current default device but not initialised."""
    assert config.indexer_types is not None
    assert config.mlp_layer_types is not None
    kinds = zip(config.indexer_types, config.mlp_layer_types, strict=True)
    blocks = [Glm52Block(config, *layer, ops) for layer in kinds]
    return Decoder(config, ops, blocks, RMSNorm(config.hidden_size, config.rms_norm_eps))


@torch.no_grad()
def initialise(module: nn.Module, deviation: float, generator: torch.Generator) -> None:
    """Draw what ``module`` itself holds: normal matrices, norms at 1, router biases at 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.normal_(0, deviation, generator=generator)
    elif isinstance(module, RMSNorm | nn.LayerNorm):
        module.weight.fill_(1)
        if isinstance(module, nn.LayerNorm):
            module.bias.zero_()
    elif isinstance(module, Router):
        module.weight.normal_(0, deviation, generator=generator)
        module.e_score_correction_bias.zero_()
    elif isinstance(module, Experts):
        module.gate_up_proj.normal_(0, deviation, generator=generator)
        module.down_proj.normal_(0, deviation, generator=generator)
