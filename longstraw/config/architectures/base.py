"""``ModelConfig``, the configuration that all model families share: sizes, rotary embedding, default lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from omegaconf import MISSING

from longstraw.config.checks import POSITIONS, SIZE, ConfigError, check_ranges, choose, number

DTYPES = ("float64", "float32", "bfloat16")


@dataclass
class RopeScaling:
    """Scaled rotary frequencies for positions past the native length; a factor of 1 leaves the embedding as it is.

    ``yarn`` is arXiv 2309.00071, ``linear`` divides every frequency by the factor, ``llama3`` the slow ones only, with
    a ramp between wavelengths; formulas and names as in transformers.
    """

    rope_type: str = "yarn"
    factor: float = number(1.0, 1, 2**20)
    original_max_position_embeddings: int | None = number(None, 1, POSITIONS)  # None: the model's
    attention_factor: float | None = number(None, 0, 1000, above=True)  # yarn: of cos and sin; None: see attention
    beta_fast: float = number(32.0, 0, 2**20, above=True)  # yarn
    beta_slow: float = number(1.0, 0, 2**20, above=True)  # yarn
    truncate: bool = True  # yarn: widen the ramp to whole dimensions
    low_freq_factor: float = number(1.0, 0, 2**20, above=True)  # llama3
    high_freq_factor: float = number(4.0, 0, 2**20, above=True)  # llama3

    def __post_init__(self) -> None:
        choose("model.rope_scaling.rope_type", self.rope_type, tuple(_SCALING_KEYS))
        check_ranges(self, "model.rope_scaling")
        if self.attention_factor is not None and self.rope_type != "yarn":
            raise ConfigError(f"model.rope_scaling.attention_factor belongs to yarn, not to {self.rope_type}")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )

    @property
    def attention(self) -> float:
        """What cos and sin are multiplied by; a product of query and key by its square."""
        if self.rope_type != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def to_hf(self) -> dict[str, Any]:
        """Return the scaling as transformers' ``rope_parameters``."""
        if self.factor == 1:
            return {"rope_type": "default"}
        values = {key: getattr(self, key) for key in _SCALING_KEYS[self.rope_type]}
        return {"rope_type": self.rope_type} | {key: value for key, value in values.items() if value is not None}


_YARN_KEYS = ("attention_factor", "beta_fast", "beta_slow", "truncate")
_SCALING_KEYS = {  # what transformers reads of each kind
    "yarn": ("factor", "original_max_position_embeddings", *_YARN_KEYS),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


@dataclass
class ModelConfig:
    """The fields that every family has, named as in ``config.json``.

    A family's class adds its own sizes. It overrides the members below to read and write its ``config.json`` and to
    name what can only be divided among ranks in whole heads or experts.
    """

    model_types: ClassVar[tuple[str, ...]] = ()  # the ``model_type`` of files that the family reads
    hf_values: ClassVar[
        dict[str, tuple[Any, ...]]
    ] = {}  # values that a file may have for these keys; messages name the first
    adapter_targets: ClassVar[tuple[str, ...]] = ()  # default targets of adapter=lora

    name: str = MISSING
    architecture: str = MISSING
    checkpoint: str | None = None  # folder in transformers' format, FILE.gguf or fetch:NAME; None: drawn from the seed
    dtype: str = "bfloat16"
    vocab_size: int = MISSING
    hidden_size: int = MISSING
    num_hidden_layers: int = MISSING
    max_position_embeddings: int = number(MISSING, 1, POSITIONS)  # the native length
    tie_word_embeddings: bool = False  # whether the head applies the embedding's weight
    rms_norm_eps: float = number(1e-6, 0, 1)
    initializer_range: float = number(0.02, 0, 100)  # above, the first norm's sum of squares overflows
    rope_theta: float = number(MISSING, 1, 1e15)
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_angles: str = "float32"  # dtype in which position * frequency is formed: float32 as transformers, or float64
    chunk: int = number(16384, 1, POSITIONS)  # defaults of the run's keys of the same names
    response_length: int = number(8192, 1, POSITIONS)
    default_adapter: str = "none"  # what adapter=auto means

    def __post_init__(self) -> None:
        check_ranges(self, "model", SIZE)
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
        scaled = int(scaling.original_max_position_embeddings * scaling.factor)
        return self.max_position_embeddings if scaling.rope_type == "llama3" else scaled  # the scaled length already

    @property
    def rope_label(self) -> str:
        """The scaling as a record has it: ``none``, or the method and its factor."""
        return (
            "none" if self.rope_scaling.factor == 1 else f"{self.rope_scaling.rope_type} {self.rope_scaling.factor:g}"
        )

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated."""
        raise NotImplementedError(f"{self.architecture}: its configuration class must define rotary_dim")

    @property
    def whole_heads(self) -> tuple[int, str] | None:
        """How many heads must be divisible by the ranks of a prompt, and their name; None if there is no such limit."""
        return None

    @property
    def experts(self) -> int:
        """The number of experts, which the ranks that own them must divide."""
        return 1

    @classmethod
    def from_hf(cls, text: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that ``config.json`` has under other names, or leaves to its class's default.

        Raises ``ConfigError`` for unsupported features beyond ``hf_values``.
        """
        return {}

    def check_hf(self, text: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if ``config.json`` contradicts these fields."""

    @property
    def not_in_hf(self) -> set[str]:
        """Fields that transformers' class has no key for."""
        return set()

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of ``config.json`` that are no fields: transformers' class and its own keys."""
        raise NotImplementedError(f"{self.architecture}: its configuration class must define to_hf")


def native_length_warning(config: ModelConfig, context: int) -> str | None:
    """Return a warning for a run whose ``context`` exceeds the model's length; None if it fits."""
    longest = config.longest_position
    if context <= longest:
        return None
    factor = math.ceil(context / config.max_position_embeddings)
    made = "native length" if config.rope_scaling.factor == 1 else f"length with {config.rope_label}"
    return (
        f"context={context} is past {config.name}'s {made}, {longest} positions: bytes and seconds are still right, "
        f"but the model extrapolates beyond it; model.rope_scaling.factor={factor} would cover it"
    )
