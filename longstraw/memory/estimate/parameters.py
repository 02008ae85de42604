"""Names and shapes of a run's parameters, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longstraw.config import RunConfig
from longstraw.config.architectures import Glm52Config, Qwen36Config
from longstraw.config.architectures.base import ModelConfig
from longstraw.memory.estimate import glm_5_2, qwen3_6
from longstraw.memory.estimate.sizes import ITEM, Shape, tensors

FROZEN = ".indexer."  # what chooses rows gets no gradient


def buffer_bytes(model: ModelConfig) -> int:
    """Return the bytes of what a model holds beside parameters; buffers have at least float32."""
    shapes = glm_5_2.buffer_shapes(model) if isinstance(model, Glm52Config) else ()
    return tensors(shapes, max(ITEM[model.dtype], ITEM["float32"]))


def parameter_shapes(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield name and shape of every parameter of ``model`` without adapters."""
    if isinstance(model, Glm52Config):
        yield from glm_5_2.parameter_shapes(model)
    else:
        assert isinstance(model, Qwen36Config)
        yield from qwen3_6.parameter_shapes(model)


def trained_shapes(config: RunConfig) -> tuple[list[tuple[Shape, int]], int]:
    """Return what is trained, each with the bytes of a number, and the bytes of what is frozen."""
    item = ITEM[config.model.dtype]
    shapes = list(parameter_shapes(config.model))
    if config.adapter.name == "none":
        still = tensors([shape for name, shape in shapes if FROZEN in name], item)
        return [(shape, item) for name, shape in shapes if FROZEN not in name], still + buffer_bytes(config.model)
    names, rank = set(adapted(config, [name for name, shape in shapes if len(shape) == 2])), config.adapter.rank
    wide = max(item, ITEM["float32"])
    pairs: list[tuple[Shape, int]] = [
        (pair, wide) for name, shape in shapes if name in names for pair in ((rank, shape[1]), (shape[0], rank))
    ]
    return pairs, tensors([shape for _, shape in shapes], item) + buffer_bytes(config.model)


def adapted(config: RunConfig, names: Sequence[str]) -> list[str]:
    """Return those weights that have a low-rank adapter."""
    targets = config.adapter.targets or config.model.adapter_targets
    return [
        name
        for name in names
        if FROZEN not in name and any(f".{name.removesuffix('.weight')}".endswith(f".{target}") for target in targets)
    ]


def gradient_item(config: RunConfig, item: int) -> int:
    """Return the bytes of a number that gradients of parameters with ``item`` bytes add up in."""
    return max(item, ITEM["float32"]) if config.optimizer.gradient_dtype == "float32" else item
