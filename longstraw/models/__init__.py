"""Models by name, with random weights or from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from longstraw.config import DTYPES, ModelConfig, choose, load_model_config, read_model_config
from longstraw.models import glm_5_2, qwen3_6
from longstraw.models.decoder import Decoder
from longstraw.models.weights import load_weights
from longstraw.ops import choose_ops

_ARCHITECTURES = {"qwen3_6": qwen3_6, "glm_5_2": glm_5_2}


def build_model(
    model: str | ModelConfig,
    *,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    backend: str | None = None,
    **overrides: Any,
) -> Decoder:
    """Return a model with random weights drawn from ``seed``.

    ``model`` is a name in ``conf/model``, of which ``overrides`` change fields, or a configuration. On the ``meta``
    device nothing is allocated or drawn. ``backend`` chooses the ops: by default ``cpu`` on a CPU, ``reference``
    elsewhere. The same seed gives the same weights in every dtype, up to rounding.
    """
    if overrides and not isinstance(model, str):
        raise TypeError(f"build_model: a configuration is given, so {', '.join(overrides)} belongs into it")
    config = load_model_config(model, **overrides) if isinstance(model, str) else model
    architecture = _ARCHITECTURES[config.architecture]
    device = torch.device(device)
    with torch.device("meta"):
        decoder = architecture.build(config, _ops(backend, device))
    generator = torch.Generator().manual_seed(seed)
    for module in decoder.modules():  # one at a time: drawn in float32, the whole is never held in it
        if device.type != "meta":
            module.to_empty(device="cpu", recurse=False)
            architecture.initialise(module, config.initializer_range, generator)
        _cast(module, device, _dtype(dtype, config))
    return decoder


def load_model(
    folder: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    backend: str | None = None,
    config: ModelConfig | None = None,
    **overrides: Any,
) -> Decoder:
    """Return the model of a checkpoint folder in transformers' format: ``config.json`` and safetensors.

    ``config`` is by default read from the folder, with ``overrides`` of its fields; ``dtype`` by default what it names.
    """
    if config is None:
        config = read_model_config(folder, **overrides)
    elif overrides:
        raise TypeError(f"load_model: config is given, so {', '.join(overrides)} belongs into it")
    device = torch.device(device)
    with torch.device("meta"):
        decoder = _ARCHITECTURES[config.architecture].build(config, _ops(backend, device))
    load_weights(decoder, folder, dtype=_dtype(dtype, config), device=device)
    return decoder


def _ops(backend: str | None, device: torch.device) -> Any:
    return choose_ops(backend or ("cpu" if device.type in ("cpu", "meta") else "reference"))


def _cast(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move and cast what ``module`` itself holds; buffers, such as what a router selects by, keep at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    module._apply(lambda tensor: tensor.to(device, dtype if isinstance(tensor, nn.Parameter) else wide), recurse=False)


def _dtype(dtype: str | torch.dtype | None, config: ModelConfig) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    choose("dtype", dtype or config.dtype, DTYPES)
    return getattr(torch, dtype or config.dtype)
