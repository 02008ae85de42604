"""A job before it runs: composed (``Draft``), then checked and frozen to ``spec.json`` (``Job``).

A run folder is never given to a second job: whether it is free is checked before anything is written there.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.config import ConfigError, RunConfig, from_composed, to_dict
from longstraw.config.specification import differing_keys
from longstraw.launch.placement import Placement
from longstraw.tracking.run_folder import read_json
from longstraw.tracking.schema import latest_attempt

SPEC = "spec.json"
RUN_ID_NAME = 40  # characters of a folder's name in a run id; W&B takes ids of up to 64 characters


@dataclass(frozen=True)
class Draft:
    """A composed job; ``error`` says why it is invalid, if it is."""

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
    """Return the draft of a job that Hydra composed, with its error if it is invalid."""
    try:
        return Draft(num, overrides, run_dir, from_composed(composed))
    except (ConfigError, OSError) as error:
        return Draft(num, overrides, run_dir, None, str(error))


def new_run_id(name: str) -> str:
    """Return a unique id that begins with ``name``, less the characters that W&B does not allow in ids."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:RUN_ID_NAME].strip(".")
    return f"{plain}-{secrets.token_hex(8)}"


def belongs_to_folder(run_dir: Path, config: RunConfig) -> bool:
    """Return ``True`` if ``run_dir`` holds this job and SLURM restarted it, ``False`` if the folder is free.

    Raises ``ConfigError`` if it holds any other run. Writes nothing.
    """
    spec, attempt = read_json(run_dir / SPEC), latest_attempt(run_dir)
    held = [name for name in (SPEC, "records.jsonl", "result.json", "checkpoints") if (run_dir / name).exists()]
    if not held and attempt is None:
        return False
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    if spec and (-1 if attempt is None else attempt) < spec.get("first_attempt", 0) + restarts and restarts:
        keys = differing_keys(spec["config"], to_dict(config))
        if not keys:
            return True
    status = read_json(run_dir / "result.json").get("status")
    ended = f"that ended with status {status}" if status else "that has not ended"
    raise ConfigError(
        f"{run_dir} holds an earlier run {ended}, and nothing in it was changed; give this one another folder"
        + ("" if status == "ok" else f", or go on with that one: python -m longstraw.status {run_dir} --again")
    )


def freeze(run_dir: Path, spec: dict[str, Any]) -> None:
    """Write ``spec.json``; raise ``ConfigError`` if another command has written one since the folder was checked."""
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        with (run_dir / SPEC).open("x") as file:
            file.write(json.dumps(spec, indent=1) + "\n")
    except FileExistsError:
        raise ConfigError(
            f"{run_dir} was taken by another command a moment ago; give this one another folder"
        ) from None
    except OSError:
        (run_dir / SPEC).unlink(missing_ok=True)
        raise
