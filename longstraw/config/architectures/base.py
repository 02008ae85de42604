"""What all model families share in their configuration: sizes, rotary embedding, lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from omegaconf import MISSING

from longstraw.config.checks import ConfigError, at_least, choose

DTYPES = ("float64", "float32", "bfloat16")


@dataclass
class RopeScaling:
    """YaRN (arXiv 2309.00071) for positions past the native length; a factor of 1 leaves the embedding as it is."""

    factor: float = 1.0
    original_max_position_embeddings: int | None = None  # None: the model's max_position_embeddings
    attention_factor: float | None = None  # multiplies cos and sin; None: 0.1 ln(factor) + 1
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # widen the ramp to whole dimensions

    def __post_init__(self) -> None:
        at_least("model.rope_scaling.factor", self.factor, 1)
        if math.isinf(self.factor):
            raise ConfigError("model.rope_scaling.factor=inf must be finite")
        at_least("model.rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings, 1)

    @property
    def attention(self) -> float:
        """What cos and sin are multiplied by; a product of query and key by its square."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor


_MAY_BE_0 = ("first_k_dense_replace", "index_skip_topk_offset")


@dataclass
class ModelConfig:
    """What every architecture shares; sizes are those of ``config.json``."""

    name: str = MISSING
    architecture: str = MISSING
    checkpoint: str | None = None  # a folder in transformers' format; None draws random weights from the seed
    dtype: str = "bfloat16"
    vocab_size: int = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_hidden_layers: int = MISSING
    max_position_embeddings: int = MISSING  # the native length
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    rope_theta: float = MISSING
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_angles: str = "float32"  # dtype in which position * frequency is formed: float32 as transformers, or float64
    chunk: int = 16384  # defaults of the run's keys of the same names
    response_length: int = 8192
    default_adapter: str = "none"  # what adapter=auto stands for

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if type(value) is int:
                at_least(f"model.{key}", value, 0 if key in _MAY_BE_0 else 1)
        at_least("model.rope_theta", self.rope_theta, 1)
        choose("model.dtype", self.dtype, DTYPES)
        choose("model.rope_angles", self.rope_angles, ("float32", "float64"))
        if self.rope_scaling.factor != 1 and self.rope_scaling.original_max_position_embeddings is None:
            native = self.max_position_embeddings
            self.rope_scaling = replace(self.rope_scaling, original_max_position_embeddings=native)

    @property
    def longest_position(self) -> int:
        """How many positions the rotary embedding was made, or scaled, for."""
        scaling = self.rope_scaling
        if scaling.factor == 1 or scaling.original_max_position_embeddings is None:
            return self.max_position_embeddings
        return int(scaling.original_max_position_embeddings * scaling.factor)

    @property
    def rope_label(self) -> str:
        """What a record says of the scaling: ``none``, or the method and its factor."""
        return "none" if self.rope_scaling.factor == 1 else f"yarn {self.rope_scaling.factor:g}"


def native_length_warning(config: ModelConfig, context: int) -> str | None:
    """Return what to tell the user, once, of a run of ``context`` positions past the model's; None where it fits."""
    longest = config.longest_position
    if context <= longest:
        return None
    factor = math.ceil(context / config.max_position_embeddings)
    made = "native length" if config.rope_scaling.factor == 1 else f"length with {config.rope_label}"
    return (
        f"context={context} is past {config.name}'s {made}, {longest} positions: bytes and seconds hold all the same, "
        f"but what the model makes of the rest is extrapolation; model.rope_scaling.factor={factor} would cover it"
    )
