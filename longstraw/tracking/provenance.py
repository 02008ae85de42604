"""Collect, once when a job starts, where its results come from: commit, versions, command and device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def startup_facts(backend: str | None = "cpu") -> dict[str, Any]:
    """Return the record's keys about this process, from ``commit`` to ``started_at``, and ``device_name``.

    ``backend`` is ``cpu``, ``cuda``, or ``None`` for a process that is not the job itself (``device_name`` is null).
    Nothing here fails, imports torch or takes more than seconds.
    """
    commit, dirty = _commit()
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": _versions(),
        "command": shlex.join(sys.orig_argv),
        "started_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device_name": None if backend is None else _device_name(backend),
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    environment = {
        **os.environ,
        "GIT_OPTIONAL_LOCKS": "0",
    }  # jobs of a sweep must not wait for each other's lock
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit this file comes from, and whether anything tracked differs from it."""
    # An installed copy may lie inside somebody else's repository: only one that tracks this file counts.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None
    status = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "HEAD"), None if status is None else bool(status)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "longstraw": _own_version()}
    packages = ("torch", "triton", "fla-core", "transformers", "peft", "numpy", "hydra-core", "submitit", "wandb")
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return {name: version for name, version in {**versions, "cuda": cuda}.items() if version}


def _own_version() -> str | None:
    try:
        return importlib.metadata.version("longstraw")
    except importlib.metadata.PackageNotFoundError:  # used from a checkout
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        try:
            return str(tomllib.loads(project.read_text())["project"]["version"])
        except (OSError, ValueError, KeyError):
            return None


def _device_name(backend: str) -> str | None:
    torch = sys.modules.get("torch")  # a job that computes has imported it
    if backend == "cuda":
        return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or None
