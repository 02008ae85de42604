"""The model of a job with its adapter: made as configured, over the ranks where there are several, and saved whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from longstraw.config import AdapterConfig, RunConfig
from longstraw.models import build_model, load_model
from longstraw.models.decoder import Decoder
from longstraw.models.hf_save import save_model
from longstraw.models.lora import add_adapter, save_adapter
from longstraw.parallel.materialize import build_sharded, gather_model
from longstraw.parallel.mesh import Mesh
from longstraw.parallel.parallelize import Parallel

Spread = tuple[Decoder, Parallel | None]
MakeModel = Callable[[RunConfig], Spread]


def configured_model(config: RunConfig, mesh: Mesh | None = None) -> Spread:
    """Return the model with its adapter, spread over the ranks where there is a mesh of them."""
    device = torch.device(config.hardware.backend)
    if mesh is not None:
        parallel = build_sharded(config.model, config.adapter, mesh, seed=config.seed, device=device)
        return parallel.model, parallel
    if config.model.checkpoint is not None:
        model = load_model(config.model.checkpoint, config=config.model, device=device)
    else:
        model = build_model(config.model, seed=config.seed, device=device)
    return add_adapter(model, config.adapter, seed=config.seed), None


def save_policy(model: Decoder, parallel: Parallel | None, adapter: AdapterConfig, folder: Path) -> None:
    """Write the adapter in PEFT's format, or the model in transformers', to a new ``folder``; every rank takes part."""
    whole = model if parallel is None else gather_model(parallel, adapter)
    if whole is not None:  # rank 0 has it
        (save_model if adapter.name == "none" else save_adapter)(whole, folder)
