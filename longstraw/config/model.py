"""Read a model's configuration, from ``conf/model`` or from a checkpoint's ``config.json``, into its family's class.

Field names are those of the published ``config.json``, so that a checkpoint's own file fills the same class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from longstraw.config.architectures import ARCHITECTURES
from longstraw.config.architectures.base import ModelConfig, RopeScaling
from longstraw.config.checks import ConfigError, choose
from longstraw.config.converted import checkpoint_folder

INNER_CHUNK = 64  # prompt chunks are multiples of it, and so of the positions that the delta rule solves at a time


def inner_chunk(key_width: int) -> int:
    """Return the positions that the delta rule solves at a time: a power of two near the width of a key head.

    Work on pairs of positions then costs about as much as work on the state; longer inner chunks would cost more.
    """
    return min(max(1 << (key_width.bit_length() - 1), 16), INNER_CHUNK)


def conf_dir() -> Path:
    """Return the folder of YAML files: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here.parent / "conf", here / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"conf/config.yaml is neither beside nor inside {here}; install longstraw again")


_USERS: list[Path] = []  # folders of option files that the command named


def use_conf_dirs(folders: Sequence[Path]) -> None:
    """Search ``folders`` for option files too, after ours, as Hydra does; raise ``ConfigError`` for a missing one."""
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder of option files; it holds folders such as model/ or hardware/")
    _USERS[:] = folders


def available(group: str) -> tuple[str, ...]:
    """Return the names in one config group, such as ``model``."""
    return tuple(sorted({path.stem for folder in (conf_dir(), *_USERS) for path in (folder / group).glob("*.yaml")}))


def option(group: str, name: str) -> dict[str, Any]:
    """Return the content of an option file over that of the options it inherits; interpolations are not resolved."""
    choose(group, name, available(group))
    found = next(path for folder in (conf_dir(), *_USERS) if (path := folder / group / f"{name}.yaml").is_file())
    plain = OmegaConf.to_container(OmegaConf.load(found))
    if not isinstance(plain, dict):
        raise ConfigError(f"{found}: an option file holds keys and values, such as name: {name}")
    if plain.get("name", name) != name:
        raise ConfigError(f"{found}: name: {plain['name']} is not the file's name; write name: {name}")
    bases = [str(entry).partition("@")[0] for entry in plain.pop("defaults", []) if isinstance(entry, str)]
    inherited = [option(group, base) for base in bases if base in available(group) and base != name]
    return {str(key): value for content in (*inherited, plain) for key, value in content.items()}


def load_model_config(name: str, **overrides: Any) -> ModelConfig:
    """Return the configuration of a model by the name of its file in ``conf/model``, without Hydra."""
    return _model_config(option("model", name), overrides)


def read_model_config(folder: str | Path, **overrides: Any) -> ModelConfig:
    """Return the configuration of a checkpoint, from the ``config.json`` that transformers wrote into its folder.

    ``folder`` may also be a GGUF file, or ``fetch:NAME``; the configuration names the folder they were converted to.
    """
    folder = checkpoint_folder(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; a checkpoint is a folder in transformers' format")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from None
    outer = _object(path, "the content", content)
    text = dict(_object(path, "text_config", outer.get("text_config") or outer))
    said = (holder.get(key) for holder in (text, outer) for key in ("dtype", "torch_dtype"))  # before transformers 5
    text["dtype"] = next(filter(None, said), None)
    text["tie_word_embeddings"] = outer.get("tie_word_embeddings", text.get("tie_word_embeddings"))  # as transformers
    _check_quantization(path, outer.get("quantization_config") or text.get("quantization_config"))
    architecture = _architecture(path, text)
    family = ARCHITECTURES[architecture]
    key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    rope = _object(path, key, text.get(key) or {})
    known = {f.name for f in fields(family)}
    values = {key: value for key, value in {**rope, **text}.items() if key in known and value is not None}
    for key, valid in family.hf_values.items():  # settings that would load and then be computed wrongly
        if text.get(key, rope.get(key)) not in valid:
            raise ConfigError(f"{path}: {key}={text.get(key, rope.get(key))!r} is not supported, only {valid[0]!r}")
    values |= {"rope_scaling": _rope_scaling(path, text, rope)}
    values |= {"name": folder.resolve().name, "architecture": architecture, "checkpoint": str(folder)}
    try:
        config = _model_config(values | family.from_hf(text), overrides)
        config.check_hf(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def _check_quantization(path: Path, said: Any) -> None:
    """Refuse quantised weights other than FP8 with block scales, which are dequantised when they are read."""
    if said is not None:
        kind = _object(path, "quantization_config", said).get("quant_method")
        if kind != "fp8":
            raise ConfigError(
                f"{path}: weights quantised by {kind!r} are not supported, only by 'fp8' with block scales"
            )


def _architecture(path: Path, text: Mapping[str, Any]) -> str:
    """Return the family that reads files of this ``model_type``."""
    names = {kind: name for name, family in ARCHITECTURES.items() for kind in family.model_types}
    kind = str(text.get("model_type"))
    if kind not in names:
        raise ConfigError(f"{path}: model_type {text.get('model_type')!r} is none of {', '.join(names)}")
    return names[kind]


def _object(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {key} is no JSON object but {value!r}")
    return value


def _rope_scaling(path: Path, text: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``RopeScaling`` for transformers' ``rope_parameters``."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in ("yarn", "linear", "llama3"):
        raise ConfigError(f"{path}: rope_type={kind!r} is not supported, only 'default', 'linear', 'llama3' and 'yarn'")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ConfigError(f"{path}: YaRN with mscale is not supported, only with attention_factor or without both")
    given = {f.name: rope[f.name] for f in fields(RopeScaling) if rope.get(f.name) is not None} | {"rope_type": kind}
    if kind != "yarn":
        return _without_yarn(path, given)
    longest = text.get("max_position_embeddings")
    original = given.setdefault("original_max_position_embeddings", longest)
    if "factor" not in given:
        if not (isinstance(longest, int) and isinstance(original, int) and original > 0):
            raise ConfigError(f"{path}: YaRN without a factor, and without the lengths to compute it")
        given["factor"] = longest / original
    return given


def _without_yarn(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Raise if a value that transformers has no default for is missing."""
    needed: tuple[str, ...] = ("factor",)
    if given["rope_type"] == "llama3":
        needed += ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    if missing := [key for key in needed if key not in given]:
        raise ConfigError(f"{path}: rope_type={given['rope_type']!r} without {', '.join(missing)}")
    return given


def _model_config(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> ModelConfig:
    schema = ARCHITECTURES[values["architecture"]]
    known = tuple(f.name for f in fields(schema))
    for key in overrides:
        choose("model field", key, known)
    config: ModelConfig = typed(schema, {**values, **overrides}, "model")
    return config


def typed(schema: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Return an object of the dataclass ``schema``; raise ``ConfigError`` naming ``where`` if a value does not fit."""
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
