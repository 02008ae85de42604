"""Counts of cut steps, kept by configuration in this process and in files, so that each is made once; no torch.

A file's name is a hash of all that a count depends on, the sources of this package and PyTorch's version included. So
nothing is ever wrong but unread: files of other versions are left behind, broken ones are ignored, and jobs that count
the same at once write the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import longstraw
from longstraw.config import RunConfig

Kinds = dict[str, int]

SOURCES = (
    "config",
    "ops",
    "layers",
    "models",
    "parallel",
    "memory",
    "rollout",
    "simulation",
    "timing",
    "training",
    "*.py",
)
SECTIONS = ("model", "adapter", "algorithm", "optimizer", "state", "simulation")
KEYS = ("context", "response_length", "chunk", "prompt_grad", "prompt_grad_window", "replay_tokens", "group_size")
DRAWING = ("sample_batch", "temperature", "top_p", "top_k", "min_p")  # where responses are drawn
OPTIMIZER = ("name", "device", "gradient_dtype")
HARDWARE = ("backend", "world_size", "dp", "ep")
WITHIN = ("context", "prompt_grad", "prompt_grad_window", "state")  # what steps of one cut model may differ in


@dataclass(frozen=True)
class Counts:
    """What one step holds on a rank, the optimizer's state made before."""

    verbs: dict[str, Kinds]  # by kind at the peak of each verb
    host: int  # the most in host memory
    tensors: int  # that are trained
    narrow_gradients: int  # bytes of their gradients in their own dtype
    first_narrowed: int  # the most bytes that bringing them into it adds before it frees as much
    last: dict[str, list[list[float]]] = field(default_factory=dict)  # ``timing.work`` of each verb's last piece


_counted: dict[str, Counts] = {}


def lookup(config: RunConfig) -> Counts | None:
    """Return what was counted of the step of ``config``, in this process or by an earlier one."""
    name = _name(config)
    if name not in _counted:
        try:
            _counted[name] = Counts(**json.loads((folder() / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError):  # none, or broken
            return None
    return _counted[name]


def keep(config: RunConfig, counts: Counts) -> None:
    """Keep what was counted of the step of ``config``; a folder that cannot be written to is passed over."""
    name = _name(config)
    _counted[name] = counts
    path = folder() / f"{name}.json"
    beside = path.with_name(f".{name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(asdict(counts)))
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def folder() -> Path:
    """Return where counts are kept: ``longstraw/memory`` in the user's folder for caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longstraw" / "memory"


def facts(config: RunConfig) -> dict[str, Any]:
    """Return what a count depends on, of a configuration."""
    sections = {name: asdict(getattr(config, name)) for name in SECTIONS}
    sections["model"].pop("checkpoint", None)
    sections["optimizer"] = {name: sections["optimizer"][name] for name in OPTIMIZER}
    hardware = {name: getattr(config.hardware, name) for name in HARDWARE}
    hardware |= {"rates": asdict(config.hardware.rates), "gpus_per_node": config.hardware.gpus_per_node}
    keys = (*KEYS, "rollout", *(DRAWING if config.rollout == "sample" else ()))
    return sections | {"hardware": hardware} | {name: getattr(config, name) for name in keys}


def of_one_cut(config: RunConfig) -> str:
    """Return what the configurations have in common of which one cut model takes the steps."""
    return json.dumps({name: x for name, x in facts(config).items() if name not in WITHIN}, sort_keys=True, default=str)


def _name(config: RunConfig) -> str:
    text = json.dumps([_version(), facts(config)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _version() -> str:
    """Return a hash of the code that decides what a step holds."""
    root, digest = Path(longstraw.__file__).parent, hashlib.sha256(metadata.version("torch").encode())
    for pattern in SOURCES:
        paths = root.glob(pattern) if pattern.endswith(".py") else (root / pattern).rglob("*.py")
        for path in sorted(paths):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
