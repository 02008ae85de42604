"""A job before it runs: composed (``Draft``), then checked and frozen to ``spec.json`` (``Job``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.config import ConfigError, RunConfig, from_composed
from longstraw.launch.placement import Placement


@dataclass(frozen=True)
class Draft:
    """A job as composed; ``error`` says why it cannot be one."""

    num: int
    overrides: list[str]
    run_dir: Path
    config: RunConfig | None
    error: str = ""


@dataclass(frozen=True)
class Job:
    """A job that can run: checked, and frozen to ``run_dir/spec.json``."""

    num: int
    overrides: list[str]
    run_dir: Path
    config: RunConfig
    placement: Placement


def draft(num: int, overrides: list[str], run_dir: Path, composed: Any) -> Draft:
    """Return the job that Hydra composed, or what is wrong with it."""
    try:
        return Draft(num, overrides, run_dir, from_composed(composed))
    except (ConfigError, OSError) as error:
        return Draft(num, overrides, run_dir, None, str(error))
