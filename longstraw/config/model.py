"""A model's sizes as a typed object, from ``conf/model`` or from a checkpoint's own ``config.json``.

Field names are those of the published ``config.json``, so that a checkpoint's own file fills the same class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from longstraw.config.architectures import ARCHITECTURES, Qwen36Config
from longstraw.config.architectures.base import ModelConfig, RopeScaling
from longstraw.config.checks import ConfigError, choose

INNER_CHUNK = 64  # prompt chunks are cut at multiples of it, and so of what the delta rule solves at a time
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
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), dict(values)))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{where}.{error.key} has no value") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]} ({error.full_key})") from None
