"""Configuration of Llama, Qwen2 and Qwen3: sizes, reading and writing ``config.json``, default targets of adapters.

transformers' class    biases                              norm of queries and keys
LlamaForCausalLM       attention_bias (q, k, v, o), mlp_bias    no
Qwen2ForCausalLM       qkv_bias                            no
Qwen3ForCausalLM       attention_bias (q, k, v, o)         qk_norm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from longstraw.config.architectures.base import ModelConfig
from longstraw.config.checks import ConfigError

_COMBINATIONS: tuple[list[str], ...] = (
    *([], ["attention_bias"], ["mlp_bias"], ["attention_bias", "mlp_bias"]),  # Llama
    *(["qkv_bias"], ["qk_norm"], ["qk_norm", "attention_bias"]),  # Qwen2; Qwen3 twice
)


@dataclass
class LlamaConfig(ModelConfig):
    """Full attention with grouped queries in every layer, SwiGLU, and a head that may be the embedding's weight."""

    model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen2", "qwen3")
    hf_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu", None),
        "use_sliding_window": (False, None),
        "partial_rotary_factor": (None, 1, 1.0),
    }
    adapter_targets: ClassVar[tuple[str, ...]] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )

    architecture: str = "llama"
    intermediate_size: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    attention_bias: bool = False  # of queries, keys, values and the output
    qkv_bias: bool = False  # of queries, keys and values alone
    mlp_bias: bool = False
    qk_norm: bool = False  # of each head's queries and keys, before rotation

    def __post_init__(self) -> None:
        super().__post_init__()
        heads, width = self.num_attention_heads, self.hidden_size
        self.num_key_value_heads = self.num_key_value_heads or heads
        if heads % self.num_key_value_heads:
            raise ConfigError(
                f"model.num_attention_heads={heads} is no multiple of num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim is None and width % heads:
            raise ConfigError(f"model.hidden_size={width} is no multiple of num_attention_heads={heads}; give head_dim")
        self.head_dim = self.head_dim or width // heads
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim} must be even: dimensions are rotated in pairs")
        given = [key for key in ("qk_norm", "qkv_bias", "attention_bias", "mlp_bias") if getattr(self, key)]
        if given not in _COMBINATIONS:
            raise ConfigError(
                f"model: no class of transformers has {' and '.join(given)}; use qkv_bias alone (Qwen2), "
                "qk_norm alone or with attention_bias (Qwen3)"
            )

    @property
    def rotary_dim(self) -> int:
        assert self.head_dim is not None
        return self.head_dim

    @classmethod
    def from_hf(cls, text: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the defaults of transformers' three classes; raise for sliding-window layers."""
        if odd := set(text.get("layer_types") or ()) - {"full_attention"}:
            raise ConfigError(f"layer_types name {', '.join(sorted(odd))}; only full_attention is supported")
        kind = text.get("model_type")
        values: dict[str, Any] = {} if _has_theta(text) else {"rope_theta": 10_000.0}
        if kind == "qwen2":
            values |= {"qkv_bias": True, "attention_bias": False}  # its class has these whatever the file says
        if kind == "qwen3":
            values |= {"qk_norm": True, "head_dim": text.get("head_dim") or 128}
        if kind != "llama":
            values |= {"mlp_bias": False, "num_key_value_heads": text.get("num_key_value_heads") or 32}
        return values

    @property
    def not_in_hf(self) -> set[str]:
        absent: dict[str, set[str]] = {"Llama": set(), "Qwen2": {"attention_bias", "mlp_bias"}, "Qwen3": {"mlp_bias"}}
        return {"qkv_bias", "qk_norm"} | absent[self._hf_name]

    @property
    def _hf_name(self) -> str:
        return "Qwen3" if self.qk_norm else "Qwen2" if self.qkv_bias else "Llama"

    def to_hf(self) -> dict[str, Any]:
        name = self._hf_name
        written: dict[str, Any] = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
        if name != "Llama":
            written |= {"use_sliding_window": False, "layer_types": ["full_attention"] * self.num_hidden_layers}
        return written


def _has_theta(text: Mapping[str, Any]) -> bool:
    return bool(text.get("rope_theta") or (text.get("rope_parameters") or {}).get("rope_theta"))
