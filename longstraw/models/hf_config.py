"""A model's ``config.json`` as transformers writes it: the inverse of ``read_model_config``."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from longstraw.config import ModelConfig
from longstraw.config.architectures.base import RopeScaling

# Of ours alone, or written elsewhere in the file.
_OWN = {"name", "architecture", "checkpoint", "dtype", "chunk", "response_length", "default_adapter"}
_ROPE = {"rope_theta", "rope_scaling", "rope_angles", "partial_rotary_factor"}


def to_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json`` for transformers' class of this model, with weights in ``dtype``.

    What the checkpoint's own file says beyond our fields, such as token ids, is kept if the checkpoint is still there.
    """
    written = _original(config)
    left_out = _OWN | _ROPE | config.not_in_hf
    ours = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in left_out}
    written |= {key: value for key, value in ours.items() if value is not None}
    written |= {"dtype": dtype, "hidden_act": "silu", "tie_word_embeddings": config.tied_embeddings}
    written["rope_parameters"] = _rope(config, written.get("rope_parameters") or {})
    return written | config.to_hf()


def _original(config: ModelConfig) -> dict[str, Any]:
    path = Path(config.checkpoint or "") / "config.json"
    if config.checkpoint is None or not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text())
    text: dict[str, Any] = content.get("text_config", content)
    return {key: value for key, value in text.items() if key not in ("torch_dtype", "rope_scaling", *_ROPE)}


def _rope(config: ModelConfig, original: dict[str, Any]) -> dict[str, Any]:
    scaling = {f.name for f in fields(RopeScaling)}
    rope = {key: value for key, value in original.items() if key not in scaling}
    rope["rope_theta"] = config.rope_theta
    if hasattr(config, "partial_rotary_factor"):
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    return rope | config.rope_scaling.to_hf()
