"""A model's sizes as typed objects, from ``conf/model`` or from a checkpoint's own ``config.json``.

Field names are those of the published ``config.json``, so that a checkpoint's own file fills the same class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from longstraw.config.checks import POSITIONS, SIZE, ConfigError, check_ranges, choose, number

DTYPES = ("float64", "float32", "bfloat16")
INNER_CHUNK = 64  # prompt chunks are cut at multiples of it, and so of what the delta rule solves at a time


@dataclass
class RopeScaling:
    """YaRN (arXiv 2309.00071) for positions past the native length; a factor of 1 leaves the embedding as it is."""

    factor: float = number(1.0, 1, 2**20)
    original_max_position_embeddings: int | None = number(None, 1, POSITIONS)  # None: the model's
    attention_factor: float | None = number(None, 0, 1000, above=True)  # of cos and sin; None: 0.1 ln(factor) + 1
    beta_fast: float = number(32.0, 0, 2**20, above=True)
    beta_slow: float = number(1.0, 0, 2**20, above=True)
    truncate: bool = True  # widen the ramp to whole dimensions

    def __post_init__(self) -> None:
        check_ranges(self, "model.rope_scaling")

    @property
    def attention(self) -> float:
        """What cos and sin are multiplied by; a product of query and key by its square."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor


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
    max_position_embeddings: int = number(MISSING, 1, POSITIONS)  # the native length
    rms_norm_eps: float = number(1e-6, 0, 1)
    initializer_range: float = number(0.02, 0, 100)  # beyond, the first norm's sum of squares overflows
    rope_theta: float = number(MISSING, 1, 1e15)
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rope_angles: str = "float32"  # dtype in which position * frequency is formed: float32 as transformers, or float64
    chunk: int = number(16384, 1, POSITIONS)  # defaults of the run's keys of the same names
    response_length: int = number(8192, 1, POSITIONS)
    default_adapter: str = "none"  # what adapter=auto stands for

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
        return int(scaling.original_max_position_embeddings * scaling.factor)

    @property
    def rope_label(self) -> str:
        """What a record says of the scaling: ``none``, or the method and its factor."""
        return "none" if self.rope_scaling.factor == 1 else f"yarn {self.rope_scaling.factor:g}"


@dataclass
class Qwen36Config(ModelConfig):
    """The hybrid of Gated DeltaNet and gated full attention: every ``full_attention_interval``-th layer is full."""

    architecture: str = "qwen3_6"
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


@dataclass
class Glm52Config(ModelConfig):
    """Latent attention over rows that an indexer chooses, and a mixture of experts after a few dense layers.

    ``indexer_types`` and ``mlp_layer_types`` say of each layer whether it has an indexer of its own (``full``) or takes
    the rows of the layer before (``shared``), and whether its feed-forward is ``dense`` or a mixture (``sparse``).
    Where they are not given, the numbers beside them decide; of lists that name further layers the first ones count.
    """

    architecture: str = "glm_5_2"
    rms_norm_eps: float = number(1e-5, 0, 1)
    latent_norm_eps: float | None = number(None, 0, 1)  # None: rms_norm_eps; transformers has 1e-6
    num_attention_heads: int = MISSING
    num_key_value_heads: int | None = None  # as many as heads: transformers' file says it, latents have none
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
            raise ConfigError("model.indexer_types[0]='shared': the first layer has no rows to take over; use 'full'")
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


ARCHITECTURES: dict[str, type[ModelConfig]] = {"qwen3_6": Qwen36Config, "glm_5_2": Glm52Config}
_MODEL_TYPES = {"qwen3_5_text": "qwen3_6", "qwen3_5": "qwen3_6", "glm_moe_dsa": "glm_5_2"}


# What adapter=lora adapts where it names no targets.
DEFAULT_TARGETS = {
    "qwen3_6": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("in_proj_qkv", "in_proj_z", "out_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
    "glm_5_2": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}


def inner_chunk(key_width: int) -> int:
    """Return the positions that the delta rule solves at a time: a power of two near the width of a key head.

    Pairs of positions within cost as much as the state then; more of them would be paid for and not be needed.
    """
    return min(max(1 << (key_width.bit_length() - 1), 16), INNER_CHUNK)


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


def conf_dir() -> Path:
    """Return the folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here.parent / "conf", here / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"conf/config.yaml is neither beside nor inside {here}; install longstraw again")


def available(group: str) -> tuple[str, ...]:
    """Return the names in one config group, such as ``model``."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def option(group: str, name: str) -> dict[str, Any]:
    """Return what one file of ``conf/`` says, its defaults list left out; interpolations stay as written."""
    plain = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "defaults"}


def load_model_config(name: str, **overrides: Any) -> ModelConfig:
    """Return the configuration of a model by the name of its file in ``conf/model``, without Hydra."""
    choose("model", name, available("model"))
    return _model_config(option("model", name), overrides)


def read_model_config(folder: str | Path, **overrides: Any) -> ModelConfig:
    """Return the configuration of a checkpoint folder, from the ``config.json`` that transformers wrote."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; a checkpoint is a folder in transformers' format")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from None
    text = _object(path, "the content", content)
    text = _object(path, "text_config", text.get("text_config") or text)
    text.setdefault("dtype", text.get("torch_dtype"))  # its name before transformers 5
    architecture = _MODEL_TYPES.get(str(text.get("model_type")))
    if architecture is None:
        raise ConfigError(f"{path}: model_type {text.get('model_type')!r} is none of {', '.join(_MODEL_TYPES)}")
    key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    rope = _object(path, key, text.get(key) or {})
    known = {f.name for f in fields(ARCHITECTURES[architecture])}
    values = {key: value for key, value in {**rope, **text}.items() if key in known and value is not None}
    _check_supported(path, text)
    values |= {"rope_scaling": _rope_scaling(path, text, rope)}
    values |= {"name": Path(folder).resolve().name, "architecture": architecture, "checkpoint": str(folder)}
    try:
        config = _model_config(values, overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    _check_layers(path, text, config)
    return config


def _object(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key} is no JSON object but {value!r}")
    return value


def _check_layers(path: Path, text: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse another order of layers than ``full_attention_interval`` gives."""
    theirs = text.get("layer_types")
    if isinstance(config, Qwen36Config) and theirs is not None:
        ours, every = config.layer_types, config.full_attention_interval
        if theirs[: len(ours)] != ours[: len(theirs)]:
            raise ConfigError(f"{path}: layer_types must be full_attention in every {every}th, linear_attention else")


def _check_supported(path: Path, text: Mapping[str, Any]) -> None:
    """Refuse what would load without complaint and then compute something else."""
    wanted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "attn_output_gate": (True, None),
        "tie_word_embeddings": (False, None),
        "mlp_bias": (False, None),
        "rope_interleave": (True, None),
        "indexer_rope_interleave": (True, None),
        "scoring_func": ("sigmoid", None),
        "n_group": (1, None),
        "index_topk_pattern": (None,),
    }
    for key, valid in wanted.items():
        if text.get(key) not in valid:
            raise ConfigError(f"{path}: {key}={text[key]!r} is not supported, only {valid[0]!r}")


def _rope_scaling(path: Path, text: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``RopeScaling`` that transformers' ``rope_parameters`` mean."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind != "yarn":
        raise ConfigError(f"{path}: rope_type={kind!r} is not supported, only 'default' and 'yarn'")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ConfigError(f"{path}: YaRN with mscale is not supported, only with attention_factor or without both")
    given = {f.name: rope[f.name] for f in fields(RopeScaling) if rope.get(f.name) is not None}
    longest = text.get("max_position_embeddings")
    original = given.setdefault("original_max_position_embeddings", longest)
    if "factor" not in given:
        if not (isinstance(longest, int) and isinstance(original, int) and original > 0):
            raise ConfigError(f"{path}: YaRN without a factor, and no lengths that give it")
        given["factor"] = longest / original
    return given


def _model_config(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> ModelConfig:
    schema = ARCHITECTURES[values["architecture"]]
    known = tuple(f.name for f in fields(schema))
    for key in overrides:
        choose("model field", key, known)
    config: ModelConfig = typed(schema, {**values, **overrides}, "model")
    return config


def typed(schema: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Return an object of the dataclass ``schema``; what does not fit is a ``ConfigError`` that names ``where``."""
    known = tuple(f.name for f in fields(schema))
    for key in values:
        choose(f"{where} key", key, known)
        if isinstance(values[key], list) and any(isinstance(item, list | dict) for item in values[key]):
            raise ConfigError(f"{where}.{key}={values[key]} is a list in a list; write [a,b]")
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), dict(values)))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{where}.{error.key} has no value") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]} ({error.full_key})") from None
