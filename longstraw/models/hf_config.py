"""A model's ``config.json`` as transformers writes it: the inverse of ``read_model_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from longstraw.config import ModelConfig
from longstraw.config.architectures.base import RopeScaling
from longstraw.config.hf_files import read_config

# Of ours alone, or written elsewhere in the file.
_OWN = {"name", "architecture", "checkpoint", "dtype", "chunk", "response_length", "default_adapter"}
_ROPE = {"rope_theta", "rope_scaling", "rope_angles", "partial_rotary_factor"}
_REPLACED = {"torch_dtype", "quantization_config"} | _ROPE


_FURTHER_TOKENS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # layers that predict tokens after the next


def to_hf_config(config: ModelConfig, dtype: str, copied: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of ``config.json`` for transformers' class of this model, with weights in ``dtype``.

    What the checkpoint's own file says beyond our fields, such as token ids, is kept if the checkpoint is still there,
    but for what was not written: ``copied`` are the tensors that come from the checkpoint beside the model's own.
    """
    outer = read_config(config.checkpoint)
    written = {key: value for key, value in outer.get("text_config", outer).items() if key not in _REPLACED}
    left_out = _OWN | _ROPE | config.not_in_hf
    ours = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in left_out}
    written |= {key: value for key, value in ours.items() if value is not None}
    written |= {"dtype": dtype, "hidden_act": "silu"}
    written["rope_parameters"] = _rope(config, written.get("rope_parameters") or {})
    if not any(name.startswith(("mtp.", "model.layers.")) for name in copied):
        written |= {key: 0 for key in _FURTHER_TOKENS if key in written}
    written |= config.to_hf()
    if not _is_wrapped(outer):
        return written
    del written["architectures"]
    kept = {key: value for key, value in outer.items() if key not in ("torch_dtype", "quantization_config")}
    return kept | {"text_config": written, "dtype": dtype, "tie_word_embeddings": config.tie_word_embeddings}


def saved_class(config: ModelConfig) -> str:
    """Return the class of transformers that what is saved of the model fits: the base checkpoint's, if it has one."""
    outer = read_config(config.checkpoint)
    own = config.to_hf()["architectures"]
    return str((outer.get("architectures") or own if _is_wrapped(outer) else own)[0])


def text_prefix(config: ModelConfig) -> str:
    """Return what the names of the text model's tensors begin with in the class of ``saved_class``."""
    return "model.language_model." if _is_wrapped(read_config(config.checkpoint)) else "model."


def _is_wrapped(outer: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` is of a class that holds the text model beside others, such as vision."""
    return "text_config" in outer


def _rope(config: ModelConfig, original: dict[str, Any]) -> dict[str, Any]:
    scaling = {f.name for f in fields(RopeScaling)}
    rope = {key: value for key, value in original.items() if key not in scaling}
    rope["rope_theta"] = config.rope_theta
    if hasattr(config, "partial_rotary_factor"):
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    return rope | config.rope_scaling.to_hf()
