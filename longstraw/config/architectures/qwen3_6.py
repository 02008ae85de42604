"""Qwen3.6: sizes, what published files say, and which modules adapters go to."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from longstraw.config.architectures.base import ModelConfig
from longstraw.config.checks import ConfigError


@dataclass
class Qwen36Config(ModelConfig):
    """The hybrid of Gated DeltaNet and gated full attention: every ``full_attention_interval``-th layer is full."""

    architecture: str = "qwen3_6"
    full_attention_interval: int = 4
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    head_dim: int = MISSING
    partial_rotary_factor: float = 0.25
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
