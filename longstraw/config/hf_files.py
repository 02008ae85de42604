"""Find and check the files of a checkpoint or adapter in transformers' format by their headers. No torch.

``models.hf_weights`` reads the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
UNREADABLE: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class CheckpointError(ValueError):
    """A folder does not hold the weights of this model, or weights cannot be written to it."""


def check_weights(folder: str | Path) -> None:
    """Raise ``CheckpointError`` where a checkpoint's index or the header of one of its files cannot be read."""
    for file in sorted(set(stored_files(Path(folder)).values())):
        read_header(file)


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
