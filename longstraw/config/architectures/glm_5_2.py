"""Configuration of GLM-5.2: sizes, reading and writing its ``config.json``, and the default targets of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from longstraw.config.architectures.base import ModelConfig
from longstraw.config.checks import ConfigError, choose, number


@dataclass
class Glm52Config(ModelConfig):
    """Latent attention over rows that an indexer chooses, and a mixture of experts after a few dense layers.

    For each layer ``indexer_types`` has ``full`` if it has its own indexer and ``shared`` if it uses the rows of the
    layer before; ``mlp_layer_types`` has ``dense`` or, for a mixture of experts, ``sparse``. Lists that are not given
    follow from the numbers beside them; of lists that are longer than the model the first entries count.
    """

    model_types: ClassVar[tuple[str, ...]] = ("glm_moe_dsa",)
    hf_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "rope_interleave": (True, None),
        "indexer_rope_interleave": (True, None),
        "scoring_func": ("sigmoid", None),
        "n_group": (1, None),
        "index_topk_pattern": (None,),
    }
    adapter_targets: ClassVar[tuple[str, ...]] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

    architecture: str = "glm_5_2"
    intermediate_size: int = MISSING
    rms_norm_eps: float = number(1e-5, 0, 1)
    latent_norm_eps: float | None = number(None, 0, 1)  # None: rms_norm_eps; transformers has 1e-6
    num_attention_heads: int = MISSING
    num_key_value_heads: int | None = None  # as many as heads, as in transformers' file; latents have no such heads
    q_lora_rank: int = MISSING
    kv_lora_rank: int = MISSING
    qk_nope_head_dim: int = MISSING
    qk_rope_head_dim: int = MISSING
    v_head_dim: int = MISSING
    index_n_heads: int = MISSING
    index_head_dim: int = MISSING
    index_topk: int = MISSING
    index_topk_freq: int = 1  # these two have transformers' defaults: an indexer in every layer
    index_skip_topk_offset: int = number(2, 0, 2**24)
    indexer_types: list[str] | None = None
    first_k_dense_replace: int = number(3, 0, 2**24)
    mlp_layer_types: list[str] | None = None
    n_routed_experts: int = MISSING
    n_shared_experts: int = 1
    num_experts_per_tok: int = MISSING
    moe_intermediate_size: int = MISSING
    norm_topk_prob: bool = True
    routed_scaling_factor: float = number(2.5, 0, 1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, offset = range(self.num_hidden_layers), self.index_skip_topk_offset - 1
        if self.indexer_types is None:
            full = [max(i - offset, 0) % self.index_topk_freq == 0 for i in layers]
            self.indexer_types = ["full" if own else "shared" for own in full]
        if self.mlp_layer_types is None:
            self.mlp_layer_types = ["dense" if i < self.first_k_dense_replace else "sparse" for i in layers]
        self.indexer_types = self._of_layers("indexer_types", ("full", "shared"))
        self.mlp_layer_types = self._of_layers("mlp_layer_types", ("dense", "sparse"))
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_key_value_heads != self.num_attention_heads:
            raise ConfigError(
                f"model.num_key_value_heads={self.num_key_value_heads} is not num_attention_heads="
                f"{self.num_attention_heads}; latent attention has one for each"
            )
        if self.indexer_types[0] != "full":
            raise ConfigError(
                "model.indexer_types[0]='shared': the first layer has no layer before it to share rows with; use 'full'"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ConfigError(
                f"model.num_experts_per_tok={self.num_experts_per_tok} is more than n_routed_experts="
                f"{self.n_routed_experts}"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise ConfigError(
                f"model.qk_rope_head_dim={self.qk_rope_head_dim} must be even and at most index_head_dim="
                f"{self.index_head_dim}"
            )

    @property
    def latent_eps(self) -> float:
        return self.rms_norm_eps if self.latent_norm_eps is None else self.latent_norm_eps

    def _of_layers(self, key: str, valid: tuple[str, ...]) -> list[str]:
        kinds: list[str] = getattr(self, key)[: self.num_hidden_layers]
        for kind in kinds:
            choose(f"model.{key}", kind, valid)
        if len(kinds) < self.num_hidden_layers:
            raise ConfigError(f"model.{key} names {len(kinds)} of num_hidden_layers={self.num_hidden_layers} layers")
        return kinds

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def experts(self) -> int:
        return self.n_routed_experts

    def to_hf(self) -> dict[str, Any]:
        return {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "attention_bias": False}
