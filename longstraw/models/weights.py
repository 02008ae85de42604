"""Checkpoints in transformers' format: safetensors in, one tensor at a time. Nothing unpickles."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# What a published checkpoint writes differently from the text model's own class.
_RENAMED = (("model.language_model.", "model."),)
_LEFT_OUT = ("mtp.", "model.visual.")


class CheckpointError(ValueError):
    """A folder that does not hold the weights of this model."""


def load_weights(model: nn.Module, folder: str | Path, *, dtype: torch.dtype, device: torch.device) -> None:
    """Fill ``model``, which may stand on the meta device, from the safetensors of ``folder``.

    Shards are read in turn, one tensor at a time, so that nothing is in memory twice. Raises ``CheckpointError`` for
    tensors that are missing or of another shape, by name; logs what the checkpoint has beyond the model.
    """
    wanted = dict(model.named_parameters())
    loaded, extra = set(), []
    for name, tensor in _stream(Path(folder)):
        for old, new in _RENAMED:
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if name not in wanted:
            extra.append(name)
            continue
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(f"{folder}: {name} is {list(tensor.shape)}, not {list(wanted[name].shape)}")
        _assign(model, name, tensor.to(device=device, dtype=dtype))
        loaded.add(name)
    if missing := sorted(wanted.keys() - loaded):
        raise CheckpointError(f"{folder}: {len(missing)} tensors are missing: {_first(missing)}")
    if unknown := [name for name in extra if not name.startswith(_LEFT_OUT)]:
        log.warning("%s: %d tensors are not of this model and were left out: %s", folder, len(unknown), _first(unknown))


def _stream(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for shard in _shards(folder):
        try:
            with safe_open(shard, framework="pt") as tensors:
                yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
        except Exception as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{shard}: cannot be read, it may have broken off: {error}") from error


def _shards(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text())
        shards = sorted({folder / name for name in index["weight_map"].values()})
        if absent := [shard.name for shard in shards if not shard.is_file()]:
            raise CheckpointError(f"{folder}: {_INDEX} names files that are not there: {_first(absent)}")
        return shards
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise CheckpointError(f"{folder}: neither {_INDEX} nor {_SINGLE} is there; it holds no weights in safetensors")


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    old = model.get_parameter(name)
    setattr(model.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=old.requires_grad))


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
