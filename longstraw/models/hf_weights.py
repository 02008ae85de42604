"""Checkpoints in transformers' format: safetensors in, one tensor at a time, and out again. Nothing unpickles.

Parameters carry transformers' names, so a checkpoint is a stream of names. What a published one writes differently:

    model.language_model.X                         model.X, the text model's own class
    mlp.experts.E.{gate,up,down}_proj.weight       slices of mlp.experts.gate_up_proj [E, 2I, d] and down_proj [E, d, I]
    mtp.*, model.visual.*, layers past the last    left out; lm_head.weight too where the embedding is the head
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longstraw.config import ModelConfig
from longstraw.config.hf_files import INDEX, SINGLE, CheckpointError, first_names, reading, stored_files
from longstraw.layers.lora_weight import effective_weight
from longstraw.models.hf_config import to_hf_config

if TYPE_CHECKING:
    from longstraw.models.decoder import Decoder

log = logging.getLogger(__name__)

SHARD_BYTES = 5 * 10**9
_COMPANIONS = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "chat_template*",
    "generation_config.json",
)
_STORED = ("F64", "F32", "F16", "BF16")  # numbers as they stand; all others need scales stored beside them
_LEFT_OUT = ("mtp.", "model.visual.", "lm_head.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")

Place = Callable[[str, Tensor], tuple[Tensor, tuple[int, ...]]]


@dataclass(frozen=True)
class LoadReport:
    """What became of a checkpoint's tensors; those not loaded by name."""

    loaded: int
    left_out: list[str]  # vision, multi-token prediction, layers past the model's last
    unknown: list[str]  # neither the model's nor known to be left out


@dataclass(frozen=True)
class _Piece:
    """A stored tensor and the box of the model's tensor that it fills."""

    stored: str
    target: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]  # of the box, as many dimensions as the target
    stored_shape: tuple[int, ...]


def load_weights(
    model: nn.Module, folder: str | Path, *, dtype: torch.dtype, device: torch.device, place: Place | None = None
) -> LoadReport:
    """Fill ``model``, which stands on the meta device, from the safetensors of ``folder``.

    Shards are read in turn, one tensor at a time, and only what the model has: nothing is in memory twice. Buffers keep
    at least float32. ``place`` is for a process that holds only a part of each tensor: from a name and the model's
    tensor it returns that part, to be filled where it is, and the offset of its first element in the whole; no more
    than the part is read, and adapters may be there already. Raises
    ``CheckpointError`` for tensors that are missing, of another shape or quantised, by name; logs what the checkpoint
    has beyond the model.
    """
    folder = Path(folder)
    buffers = {name for name, _ in model.named_buffers()}
    targets = {_plain(name): tensor for name, tensor in model.state_dict(keep_vars=True).items() if not _adapter(name)}
    shards: dict[Path, list[_Piece]] = defaultdict(list)
    others = []
    for stored, shard in stored_files(folder).items():
        piece = _piece(stored, targets)
        if piece is None:
            others.append(_model_name(stored))
        else:
            shards[shard].append(piece)
    pieces = [piece for shard in shards.values() for piece in shard]
    _refuse_missing(folder, targets, pieces)

    def whole(name: str, tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        own = torch.promote_types(dtype, torch.float32) if name in buffers else dtype
        return torch.empty(tensor.shape, dtype=own, device=device), (0,) * tensor.dim()

    filled: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
    with torch.no_grad():
        for shard in sorted(shards):
            for piece, source in _read(shard, shards[shard]):
                if piece.target not in filled:
                    filled[piece.target] = (place or whole)(piece.target, targets[piece.target])
                _copy(piece, source, *filled[piece.target])
    for name, (tensor, _) in filled.items() if place is None else ():
        _assign(model, name, tensor)
    return _report(folder, len(pieces), others, targets)


def _model_name(stored: str) -> str:
    return re.sub(r"^model\.language_model\.", "model.", stored)


def _piece(stored: str, targets: dict[str, Tensor]) -> _Piece | None:
    """Return where a stored tensor goes, or None if the model has no place for it."""
    name = _model_name(stored)
    if name in targets:
        shape = tuple(targets[name].shape)
        return _Piece(stored, name, (0,) * len(shape), shape, shape)
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    experts, index, role = match[1], int(match[2]), match[3]
    target = f"{experts}.{'down' if role == 'down' else 'gate_up'}_proj"
    if target not in targets or index >= len(targets[target]):
        return None
    _, rows, columns = targets[target].shape
    first, rows = {"gate": (0, rows // 2), "up": (rows // 2, rows // 2), "down": (0, rows)}[role]
    return _Piece(stored, target, (index, first, 0), (1, rows, columns), (rows, columns))


def _refuse_missing(folder: Path, targets: dict[str, Tensor], pieces: Iterable[_Piece]) -> None:
    found = {_model_name(piece.stored) for piece in pieces}
    missing = []
    for name, tensor in targets.items():
        if name not in found:
            missing += [part for part in expert_names(name, len(tensor)) or [name] if part not in found]
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} tensors of the model are missing: {first_names(missing)}")


def expert_names(fused: str, experts: int) -> list[str]:
    """Return the names under which a fused expert tensor is published, in order; empty if ``fused`` is none."""
    match = _FUSED.fullmatch(fused)
    if match is None:
        return []
    roles = ("gate", "up") if match[2] == "gate_up" else ("down",)
    return [f"{match[1]}.{expert}.{role}_proj.weight" for expert in range(experts) for role in roles]


def _read(shard: Path, pieces: list[_Piece]) -> Iterator[tuple[_Piece, Any]]:
    """Yield the pieces of one file with their data, of which nothing is read before it is indexed."""
    with reading(shard, SafetensorError), safe_open(shard, framework="pt") as tensors:
        for piece in pieces:
            source = tensors.get_slice(piece.stored)
            if tuple(source.get_shape()) != piece.stored_shape:
                raise CheckpointError(
                    f"{shard}: {piece.stored} is {source.get_shape()}, not {list(piece.stored_shape)} as the model's"
                )
            if source.get_dtype() not in _STORED:
                raise CheckpointError(
                    f"{shard}: {piece.stored} is stored as {source.get_dtype()}; quantised checkpoints are not "
                    f"supported, only {', '.join(_STORED)}"
                )
            yield piece, source


def _copy(piece: _Piece, source: Any, storage: Tensor, offset: tuple[int, ...]) -> None:
    """Copy what ``piece`` and ``storage``, which begins at ``offset`` of the whole tensor, have in common."""
    there, here = [], []
    for box, size, first, length in zip(piece.offset, piece.shape, offset, storage.shape, strict=True):
        start, end = max(box, first), min(box + size, first + length)
        if start >= end:
            return
        there.append(slice(start - box, end - box))
        here.append(slice(start - first, end - first))
    storage[tuple(here)].copy_(source[tuple(there[-len(piece.stored_shape) :])])


def _adapter(name: str) -> bool:
    return ".lora_" in name


def _plain(name: str) -> str:
    """Return a weight's name without what an adapter around its module adds to it."""
    return name.replace(".base_layer.", ".")


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
    else:
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=module.get_parameter(leaf).requires_grad))


def _report(folder: Path, loaded: int, others: list[str], targets: dict[str, Tensor]) -> LoadReport:
    layers = {int(match[1]) for name in targets if (match := _LAYER.match(name))}
    beyond = max(layers, default=-1) + 1

    def expected(name: str) -> bool:
        match = _LAYER.match(name)
        return name.startswith(_LEFT_OUT) or (match is not None and int(match[1]) >= beyond)

    left_out, unknown = [n for n in others if expected(n)], [n for n in others if not expected(n)]
    if left_out:
        parts = Counter(f"model.layers.{m[1]}" if (m := _LAYER.match(n)) else _prefix(n) for n in left_out)
        log.info("%s: left out %s", folder, ", ".join(f"{part} ({count} tensors)" for part, count in parts.items()))
    if unknown:
        log.warning(
            "%s: %d tensors are not of this model and were left out: %s", folder, len(unknown), first_names(unknown)
        )
    return LoadReport(loaded, left_out, unknown)


def _prefix(name: str) -> str:
    return next(prefix.rstrip(".") for prefix in _LEFT_OUT if name.startswith(prefix))


def save_model(model: Decoder, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``model`` as a new checkpoint that transformers and ``load_model`` read.

    Adapters that are switched on are added into the weights. Experts are written one by one, as they are published.
    Files hold at most ``shard_bytes`` (or one tensor); no more than one is in memory beside the model. The folder
    appears whole or not at all; raises ``CheckpointError`` if it already holds something.
    """
    dtype = str(model.lm_head.weight.dtype).removeprefix("torch.")
    with new_folder(folder) as made:
        _write_shards(list(_to_write(model)), made, shard_bytes)
        for source in _companions(model.config):
            shutil.copyfile(source, made / source.name)
        (made / "config.json").write_text(json.dumps(to_hf_config(model.config, dtype), indent=2) + "\n")


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Give a hidden folder to fill and rename it to ``folder`` when that went well; otherwise nothing is left of it."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: is there already; save to a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as unfinished:
        made = Path(unfinished) / folder.name
        made.mkdir()
        yield made
        made.replace(folder)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return all tensors of one small file, such as an adapter's."""
    with reading(file, SafetensorError):
        return load_file(file)


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write one file of safetensors."""
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(content, file, metadata={"format": "pt"})


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
