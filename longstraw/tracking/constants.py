"""Compute the keys of a record that follow from the configuration alone."""

from __future__ import annotations

from typing import Any

from longstraw.config import RunConfig
from longstraw.memory.estimate import known
from longstraw.tracking.schema import plain


def constant_keys(config: RunConfig) -> dict[str, Any]:
    """Return the keys that the configuration alone decides, so that rows written before the first step have them.

    ``mode`` is null while it is still ``auto``. What is predicted is the job's largest step, null where it has not been
    counted; a step's own row says what was predicted of that step.
    """
    largest = known(config) if config.rollout == "given" else None
    return {
        "claim": config.claim,
        "mode": None if config.mode == "auto" else config.mode,
        "model": config.model.name,
        "adapter": config.adapter.name,
        "algorithm": config.algorithm.name,
        "optimizer": config.optimizer.name,
        "learning_rate": config.optimizer.lr,
        "data": config.data.name,
        "dtype": config.model.dtype,
        "state_dtype": config.state.dtype or config.model.dtype,
        "state_gradient_dtype": config.state.gradient_dtype
        or ("float64" if config.model.dtype == "float64" else "float32"),
        "state_device": config.state.device or config.hardware.backend,
        "keep_attention": config.state.keep_attention,
        "rope_scaling": None if config.model.rope_scaling.factor == 1 else plain(vars(config.model.rope_scaling)),
        "past_native_length": config.context > config.model.longest_position,
        "hardware": config.hardware.name,
        "world_size": config.hardware.world_size,
        "nodes": config.hardware.nodes,
        "group_size": config.group_size,
        "context": config.context,
        "prompt_positions": config.prompt_positions,
        "chunk": config.chunk,
        "prompt_grad": config.prompt_grad,
        "prompt_grad_window": config.prompt_grad_window,
        "refresh_every": config.refresh_every,
        "seed": config.seed,
        "rollout": config.rollout,
        "updates_per_rollout": config.updates,
        "temperature": config.temperature,
        "steps": config.steps,
        "predicted_peak_bytes": largest and largest.peak,
        "predicted_bytes_by_kind": largest and largest.by_kind,
    }
