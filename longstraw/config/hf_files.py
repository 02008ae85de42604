"""Find and check the files of a checkpoint or adapter in transformers' format by their headers. No torch.

``models.hf_weights`` reads the tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
UNREADABLE: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
PLAIN = ("F64", "F32", "F16", "BF16")  # numbers as they stand
FP8 = "F8_E4M3"  # numbers that a block's scale, stored beside them, multiplies
SCALE = "_scale_inv"
_PLACEHOLDER = re.compile(r"(image|video|audio|vision)_(\w+_)?token_(id|index)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class CheckpointError(ValueError):
    """A folder does not hold the weights of this model, or weights cannot be written to it."""


def check_weights(folder: str | Path, *, layers: int = 0, embedding: tuple[int, int] | None = None) -> None:
    """Raise ``CheckpointError`` where the weights of ``folder`` cannot be those of a model; no tensor is read.

    Index and headers must be readable, dtypes and scales such as ``find_scales`` takes, the first so many ``layers``
    and the ``embedding``, of so many rows and columns, be there.
    """
    headers = read_headers(Path(folder))
    find_scales(Path(folder), headers)
    found = {int(match[1]) for name in headers if name.startswith("model.") and (match := _LAYER.search(name))}
    if absent := [f"layer {i}" for i in range(layers) if i not in found]:
        raise CheckpointError(f"{folder}: no tensor of {first_names(absent)}; config.json says {layers} layers")
    shapes = [tuple(tensor["shape"]) for name, tensor in headers.items() if name.endswith(".embed_tokens.weight")]
    if embedding is not None and embedding not in shapes:
        there = f"is {list(shapes[0])}" if shapes else "is not there"
        raise CheckpointError(f"{folder}: the embedding {there}; config.json says {list(embedding)}")


def read_headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Return ``dtype`` and ``shape`` of each tensor that a checkpoint holds, by the name it is stored under."""
    files = stored_files(folder)
    read = {file: read_header(file) for file in sorted(set(files.values()))}
    if absent := sorted(name for name, file in files.items() if name not in read[file]):
        raise CheckpointError(f"{folder}: {INDEX} names tensors that no file has: {first_names(absent)}")
    return {name: read[file][name] for name, file in files.items()}


def find_scales(folder: Path, headers: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the name of the scales of each FP8 tensor, by its name.

    Raises ``CheckpointError`` for FP8 without scales, scales beside plain numbers, blocks that do not come out even
    (as transformers does), and any other way to quantise.
    """
    scales = {}
    for name, tensor in headers.items():
        weight = name.removesuffix(SCALE)
        if name != weight:
            if headers.get(weight, {}).get("dtype") != FP8:
                kind = headers[weight]["dtype"] if weight in headers else "not there"
                raise CheckpointError(f"{folder}: {name} are scales, and {weight} is {kind}, not {FP8}")
        elif tensor["dtype"] == FP8:
            if name + SCALE not in headers:
                raise CheckpointError(f"{folder}: {name} is stored as {FP8}, and its scales {name + SCALE} are missing")
            grid, shape = headers[name + SCALE]["shape"], tensor["shape"]
            if len(grid) != len(shape) or any(not g or n % g for g, n in zip(grid, shape, strict=True)):
                raise CheckpointError(f"{folder}: {name} is {shape}, which scales of {grid} do not divide evenly")
            if (kind := headers[name + SCALE]["dtype"]) not in PLAIN:
                raise CheckpointError(f"{folder}: {name + SCALE} are {kind}; scales must be {', '.join(PLAIN)}")
            scales[name] = name + SCALE
        elif tensor["dtype"] not in PLAIN and not name.startswith(("mtp.", "model.visual.")):
            raise CheckpointError(
                f"{folder}: {name} is stored as {tensor['dtype']}; quantised checkpoints are not supported, only "
                f"{', '.join(PLAIN)}, and {FP8} with block scales"
            )
    return scales


def read_config(folder: str | Path | None, name: str = "config.json") -> dict[str, Any]:
    """Return what a checkpoint's ``config.json``, or other such file, says; empty where there is none."""
    path = Path(folder or "").expanduser() / name
    if folder is None or not path.is_file():
        return {}
    with reading(path):
        content: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
    return content


def placeholder_ids(folder: str | Path | None) -> dict[int, str]:
    """Return the token ids that images, video or audio would replace, with the keys of ``config.json`` that say so."""
    named = {key: value for key, value in read_config(folder).items() if _PLACEHOLDER.fullmatch(key)}
    return {value: key for key, value in named.items() if isinstance(value, int)}


def end_tokens(folder: str | Path | None) -> list[int]:
    """Return the token ids that end a response; empty where a checkpoint names none.

    They are ``eos_token_id`` of its ``generation_config.json``, else of its ``config.json``, else the tokenizer's
    ``eos_token``.
    """
    config = read_config(folder)
    for values in (read_config(folder, "generation_config.json"), config, config.get("text_config") or {}):
        found = values.get("eos_token_id")
        if found is not None:
            return list(found) if isinstance(found, list) else [found]
    named = read_config(folder, "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    added = read_config(folder, "tokenizer.json").get("added_tokens", []) if text is not None else []
    return [token["id"] for token in added if token["content"] == text]


def check_adapter(folder: str | Path) -> None:
    """Raise ``CheckpointError`` where an adapter is not there as PEFT writes it, or cannot be read."""
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER).is_file():
        raise CheckpointError(f"{folder}: not both of {ADAPTER_CONFIG} and {ADAPTER} are there, as PEFT writes them")
    with reading(folder / ADAPTER_CONFIG):
        kind = json.loads((folder / ADAPTER_CONFIG).read_text()).get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder}: an adapter of type {kind}; only LORA is supported")
    read_header(folder / ADAPTER)


def stored_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor that a checkpoint holds, by the name it is stored under."""
    if (folder / INDEX).is_file():
        with reading(folder / INDEX):
            listed = json.loads((folder / INDEX).read_text())["weight_map"]
            if not all(isinstance(file, str) for file in listed.values()):
                raise ValueError("weight_map names no files")
        if absent := sorted({file for file in listed.values() if not (folder / file).is_file()}):
            raise CheckpointError(f"{folder}: {INDEX} names files that are not there: {first_names(absent)}")
        return {name: folder / file for name, file in listed.items()}
    if (folder / SINGLE).is_file():
        return dict.fromkeys(read_header(folder / SINGLE), folder / SINGLE)
    if pickled := sorted(path.name for pattern in PICKLED for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder}: no safetensors, only {first_names(pickled)}; such files can run code when they are read and "
            "are never read here: convert them to safetensors (transformers: from_pretrained, then save_pretrained)"
        )
    raise CheckpointError(f"{folder}: neither {INDEX} nor {SINGLE} is there: it holds no weights")


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, by tensor name; raise if the file is not as long as it says.

    Eight bytes hold the length of a JSON object, whose ``data_offsets`` count from its end
    (https://github.com/huggingface/safetensors#format).
    """
    with reading(path), path.open("rb") as file:
        length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
        if length > size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        tensors = {k: v for k, v in json.loads(file.read(length)).items() if k != "__metadata__"}
        wanted = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        if wanted != size:
            raise ValueError(f"{size} bytes of {wanted}")
    return tensors


@contextmanager
def reading(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Turn errors while ``path`` is read, ``others`` included, into a ``CheckpointError`` that names the file."""
    try:
        yield
    except (*UNREADABLE, *others) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read, it may be incomplete: {error}") from error


def first_names(names: list[str]) -> str:
    """Return the first few of ``names`` for a message, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
