"""A model written as a checkpoint in transformers' format, of the class that its base checkpoint names.

What of the base the text model has no place for, vision and multi-token prediction, is copied from its files.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from longstraw.config import ModelConfig
from longstraw.config.hf_files import INDEX, SCALE, SINGLE, find_scales, read_config, read_headers, stored_files
from longstraw.layers.lora_weight import effective_weight
from longstraw.models.decoder import Decoder
from longstraw.models.hf_config import saved_class, text_prefix, to_hf_config
from longstraw.models.hf_weights import (
    expert_names,
    is_left_out,
    model_name,
    name_parts,
    new_folder,
    read_tensor,
    write_tensors,
)

log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
_COMPANIONS = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)


def save_model(model: Decoder, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``model`` as a new checkpoint that transformers and ``load_model`` read.

    It has the class that the base checkpoint's ``config.json`` names, or the text model's where there is no base.
    Tensors of the base that the model has no place for, such as those of vision, are copied from it. Adapters that
    are switched on are added into the weights. Experts are written one by one, as they are published.
    Files hold at most ``shard_bytes`` (or one tensor); no more than one is in memory beside the model. The folder
    appears whole or not at all; raises ``CheckpointError`` if it already holds something.
    """
    dtype = model.lm_head.weight.dtype
    copied = list(_untouched(model.config, dtype))
    names = [model_name(name) for name, _, _ in copied]
    content = to_hf_config(model.config, str(dtype).removeprefix("torch."), names)
    prefix = text_prefix(model.config)
    ours = [(re.sub(r"^model\.", prefix, name), size, read) for name, size, read in _to_write(model)]
    with new_folder(folder) as made:
        _write_shards(ours + copied, made, shard_bytes)
        for source in _companions(model.config):
            shutil.copyfile(source, made / source.name)
        (made / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    base = f"; from {model.config.checkpoint}: {name_parts(names)}" if names else ""
    log.info("%s: a checkpoint of %s%s", folder, saved_class(model.config), base)


def _untouched(config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    """Yield name, bytes and reader of the base checkpoint's tensors that the model has no place for.

    What is FP8 there gets ``dtype``. A model with fewer layers than its base keeps no layers that predict further
    tokens: they follow the last one. Says in one line what is not copied.
    """
    if config.checkpoint is None:
        return
    folder = Path(config.checkpoint)
    if not (folder / "config.json").is_file():
        log.warning("%s: not there any more; what it has beside the text model is not copied", folder)
        return
    content = read_config(folder)
    layers = content.get("text_config", content).get("num_hidden_layers", config.num_hidden_layers)
    files, headers = stored_files(folder), read_headers(folder)
    scales, dropped = find_scales(folder, headers), []
    for name, file in files.items():
        plain = model_name(name)
        if name.endswith(SCALE) or plain.startswith("lm_head.") or not is_left_out(plain, layers):
            continue
        if layers != config.num_hidden_layers and not plain.startswith("model.visual."):
            dropped.append(plain)
            continue
        begin, end = headers[name]["data_offsets"]
        size = math.prod(headers[name]["shape"]) * dtype.itemsize if name in scales else end - begin
        scale = (scales[name], files[scales[name]]) if name in scales else None
        yield name, size, partial(read_tensor, name, file, scale, dtype)
    if dropped:
        log.warning("%s: not copied, for the model has fewer layers: %s", folder, name_parts(dropped))


def _to_write(model: nn.Module) -> Iterator[tuple[str, int, Callable[[], Tensor]]]:
    """Yield name, bytes and reader of what is written: experts one by one, adapters within their weights."""
    for name, tensor in model.state_dict().items():
        wrapped, base, leaf = name.rpartition(".base_layer.")
        if base and leaf == "weight":
            merged = partial(_merged, model.get_submodule(wrapped), tensor.dtype)
            yield f"{wrapped}.{leaf}", tensor.nbytes, merged
        elif ".lora_" not in name:
            plain = f"{wrapped}.{leaf}" if base else name
            parts = expert_names(plain, len(tensor) if tensor.dim() else 0)
            pieces = tensor.flatten(0, 1).chunk(len(parts)) if parts else [tensor]
            yield from ((n, piece.nbytes, piece.clone) for n, piece in zip(parts or [plain], pieces, strict=True))


def _merged(module: nn.Module, dtype: torch.dtype) -> Tensor:
    return effective_weight(module).to(dtype)


def _write_shards(tensors: list[tuple[str, int, Callable[[], Tensor]]], folder: Path, limit: int) -> None:
    """Write files of at most ``limit`` bytes, or one tensor, and their index if there is more than one."""
    shards: list[dict[str, Callable[[], Tensor]]] = [{}]
    room = limit
    for name, size, read in tensors:
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = read
        room -= size
    total = len(shards)
    files = [SINGLE] if total == 1 else [f"model-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_tensors({name: read() for name, read in shard.items()}, folder / file)
    if total > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(size for _, size, _ in tensors)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _companions(config: ModelConfig) -> list[Path]:
    """Return what a folder needs beside weights to be used, from the checkpoint that the model came from."""
    folder = Path(config.checkpoint) if config.checkpoint else None
    return [] if folder is None else sorted({path for pattern in _COMPANIONS for path in folder.glob(pattern)})
