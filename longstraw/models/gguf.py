"""GGUF files as checkpoints in transformers' format, through transformers' own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longstraw.config import ARCHITECTURES
from longstraw.config.hf_files import CheckpointError
from longstraw.models.hf_weights import new_folder


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the weights of ``file``, dequantised to float32, with its tokenizer and chat template to ``folder``.

    The folder appears whole or not at all. Raises ``CheckpointError`` for a file that transformers cannot read, or of
    a family that is not supported.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # seconds to import

    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        kind = AutoConfig.from_pretrained(file.parent, **where).model_type
    except Exception as error:  # its reader raises many kinds, and what is to be done is the same
        raise CheckpointError(f"{file}: transformers cannot read it: {error}") from error
    supported = [known for family in ARCHITECTURES.values() for known in family.model_types]
    if kind not in supported:
        raise CheckpointError(f"{file}: model_type {kind!r} is none of {', '.join(supported)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    except Exception as error:
        raise CheckpointError(f"{file}: transformers cannot read it: {error}") from error
    del read.config.quantization_config  # the numbers are plain now, and save_pretrained refuses a quantised model
    with torch.device("meta"):
        model = type(read)(read.config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    with new_folder(folder) as made:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
