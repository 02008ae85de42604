"""Checkpoints in transformers' format, read one tensor at a time. Nothing unpickles. The doorway to safetensors.

Parameters carry transformers' names, so a checkpoint is a stream of names. What a published one writes differently:

    model.language_model.X                         model.X, the text model's own class
    mlp.experts.E.{gate,up,down}_proj.weight       slices of mlp.experts.gate_up_proj [E, 2I, d] and down_proj [E, d, I]
    W and W_scale_inv, a number for each block     W * scale: float8_e4m3fn dequantised while it is read
    mtp.*, model.visual.*, layers past the last    left out; lm_head.weight too where the embedding is the head
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longstraw.config.hf_files import (
    SCALE,
    CheckpointError,
    find_scales,
    first_names,
    read_headers,
    reading,
    stored_files,
)

log = logging.getLogger(__name__)

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
    scale: tuple[str, Path] | None = None  # name and file of what multiplies its blocks


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
    files, headers = stored_files(folder), read_headers(folder)
    scales = find_scales(folder, headers)
    buffers = {name for name, _ in model.named_buffers()}
    targets = {_plain(name): tensor for name, tensor in model.state_dict(keep_vars=True).items() if not _adapter(name)}
    shards: dict[Path, list[_Piece]] = defaultdict(list)
    others = []
    for stored, shard in files.items():
        piece = _piece(stored, targets)
        if piece is not None:
            scale = scales.get(stored)
            shards[shard].append(piece if scale is None else replace(piece, scale=(scale, files[scale])))
        elif not stored.endswith(SCALE):
            others.append(model_name(stored))
    pieces = [piece for shard in shards.values() for piece in shard]
    _refuse_missing(folder, targets, pieces)
    wide = (p for p in pieces if p.target not in buffers and _narrows(headers[p.stored]["dtype"], dtype))
    if narrowed := [piece.target for piece in wide]:
        kept = str(dtype).removeprefix("torch.")
        log.warning(
            "%s: %d tensors are wider than %s and are rounded: %s", folder, len(narrowed), kept, first_names(narrowed)
        )

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


def model_name(stored: str) -> str:
    return re.sub(r"^model\.language_model\.", "model.", stored)


def _piece(stored: str, targets: dict[str, Tensor]) -> _Piece | None:
    """Return where a stored tensor goes, or None if the model has no place for it."""
    name = model_name(stored)
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
    found = {model_name(piece.stored) for piece in pieces}
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
            if piece.scale is None:
                yield piece, source
                continue
            name, file = piece.scale
            with safe_open(file, framework="pt") as beside:
                yield piece, _Blocks(source, beside.get_tensor(name))


class _Blocks:
    """A stored FP8 tensor that is dequantised where it is indexed: its blocks times their scales, in float32.

    As ``Fp8Dequantize`` of transformers' ``finegrained_fp8``: the size of a block is that of the tensor over that of
    the grid of scales.
    """

    def __init__(self, source: Any, scales: Tensor) -> None:
        self._source, self._scales = source, scales.float()

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        scales = self._scales
        for axis, (size, part) in enumerate(zip(self._source.get_shape(), where, strict=True)):
            block = size // scales.shape[axis]
            scales = scales.index_select(axis, torch.arange(part.start, part.stop) // block)
        return self._source[where].float() * scales


def _narrows(stored: str, dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` cannot hold all numbers of a stored one: float64 is wider, also than what is trained."""
    return stored == "F32" and torch.finfo(dtype).bits < 32


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
    left_out = [name for name in others if is_left_out(name, beyond)]
    unknown = [name for name in others if not is_left_out(name, beyond)]
    if left_out:
        log.info("%s: left out %s", folder, name_parts(left_out))
    if unknown:
        log.warning(
            "%s: %d tensors are not of this model and were left out: %s", folder, len(unknown), first_names(unknown)
        )
    return LoadReport(loaded, left_out, unknown)


def is_left_out(name: str, layers: int) -> bool:
    """Return whether a model of so many layers is known to have no place for ``name``."""
    match = _LAYER.match(name)
    return name.startswith(_LEFT_OUT) or (match is not None and int(match[1]) >= layers)


def name_parts(names: Iterable[str]) -> str:
    """Return a message's words for tensors that are left out: their parts, with the number of tensors in each."""
    parts = Counter(f"model.layers.{m[1]}" if (m := _LAYER.match(n)) else _prefix(n) for n in names)
    return ", ".join(f"{part} ({count} tensors)" for part, count in parts.items())


def _prefix(name: str) -> str:
    return next(prefix.rstrip(".") for prefix in _LEFT_OUT if name.startswith(prefix))


def read_tensor(name: str, file: Path, scale: tuple[str, Path] | None, dtype: torch.dtype) -> Tensor:
    """Return one tensor of a file as it is, or dequantised to ``dtype``."""
    with reading(file, SafetensorError), safe_open(file, framework="pt") as tensors:
        if scale is None:
            return tensors.get_tensor(name)
        with safe_open(scale[1], framework="pt") as beside:
            blocks = _Blocks(tensors.get_slice(name), beside.get_tensor(scale[0]))
        return blocks[tuple(slice(0, size) for size in tensors.get_slice(name).get_shape())].to(dtype)


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
