"""Configuration of Qwen3.6: sizes, reading and writing its ``config.json``, and the default targets of adapters.

``HybridConfig`` has what the dense models share with those with a mixture of experts (``qwen3_6_moe``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from longstraw.config.architectures.base import ModelConfig
from longstraw.config.checks import ConfigError, number


@dataclass
class HybridConfig(ModelConfig):
    """The hybrid of Gated DeltaNet and gated full attention: every ``full_attention_interval``-th layer is full."""

    hf_values: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "attn_output_gate": (True, None),
    }
    adapter_targets: ClassVar[tuple[str, ...]] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("in_proj_qkv", "in_proj_z", "out_proj"),
    )

    full_attention_interval: int = 4
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int = MISSING
    partial_rotary_factor: float = number(0.25, 0, 1, above=True)
    linear_num_key_heads: int = MISSING
    linear_num_value_heads: int = MISSING
    linear_key_head_dim: int = MISSING
    linear_value_head_dim: int = MISSING
    linear_conv_kernel_dim: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for few, many in (
            ("num_key_value_heads", "num_attention_heads"),
            ("linear_num_key_heads", "linear_num_value_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ConfigError(f"model.{many}={getattr(self, many)} is no multiple of {few}={getattr(self, few)}")
        if self.rotary_dim % 2:
            raise ConfigError(
                f"model.head_dim={self.head_dim} x partial_rotary_factor={self.partial_rotary_factor} gives "
                f"{self.rotary_dim} rotary dimensions; they must be even"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> list[str]:
        """One of ``linear_attention`` and ``full_attention`` per layer, in transformers' words."""
        full = self.full_attention_interval
        return ["linear_attention" if (i + 1) % full else "full_attention" for i in range(self.num_hidden_layers)]

    @property
    def whole_heads(self) -> tuple[int, str]:
        return self.linear_num_key_heads, "key heads in the delta layers"

    def check_hf(self, text: Mapping[str, Any]) -> None:
        """Raise unless the layers' order is that of ``full_attention_interval``."""
        theirs, ours, every = text.get("layer_types"), self.layer_types, self.full_attention_interval
        if theirs is not None and theirs[: len(ours)] != ours[: len(theirs)]:
            raise ConfigError(f"layer_types must be full_attention in every {every}th, linear_attention else")

    def to_hf(self) -> dict[str, Any]:
        return {"attention_bias": False, "layer_types": self.layer_types}


@dataclass
class Qwen36Config(HybridConfig):
    """The dense models: every layer's feed-forward is a SwiGLU."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    adapter_targets: ClassVar[tuple[str, ...]] = (*HybridConfig.adapter_targets, "gate_proj", "up_proj", "down_proj")

    architecture: str = "qwen3_6"
    intermediate_size: int = MISSING

    def to_hf(self) -> dict[str, Any]:
        return {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"} | super().to_hf()
