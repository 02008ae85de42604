"""Configuration of Qwen3.6 with a mixture of experts, as Qwen3.6-35B-A3B: sizes, and writing its ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import MISSING

from longstraw.config.architectures.qwen3_6 import HybridConfig
from longstraw.config.checks import ConfigError


@dataclass
class Qwen36MoeConfig(HybridConfig):
    """The layers of Qwen3.6 with routed experts and a shared one in place of each SwiGLU.

    Adapters have no default target in the feed-forward: routed experts are no linear modules, and the shared expert is
    a small part of it.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text", "qwen3_5_moe")

    architecture: str = "qwen3_6_moe"
    num_experts: int = MISSING
    num_experts_per_tok: int = MISSING
    moe_intermediate_size: int = MISSING
    shared_expert_intermediate_size: int = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"model.num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}"
            )

    @property
    def experts(self) -> int:
        return self.num_experts

    def to_hf(self) -> dict[str, Any]:
        return {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"} | super().to_hf()
