"""What runs where the hardware is: one job, from its frozen ``spec.json`` to its records.

Submitted by reference, so nothing but a path is pickled and what was typed is what runs, also after a requeue.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from longstraw.config import ConfigError, from_dict
from longstraw.failures import describe, status_of
from longstraw.provenance import startup_facts
from longstraw.record import append_row
from longstraw.schema import RecordError, constant_keys
from longstraw.table import last_row


def execute(run_dir: str | Path) -> None:
    """Run the job that ``run_dir/spec.json`` describes and leave ``result.json``; raise what the job raised.

    Whatever happens to the job, short of a kill, its records have a line that says so. Only rank 0 writes.
    """
    folder = Path(run_dir)
    spec = json.loads((folder / "spec.json").read_text())
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    try:
        config = from_dict(spec["config"])
        # Threads that spin while they wait are three times slower as soon as anything else runs on the machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded
        from longstraw.train import run_job  # imports torch

        context = {key: spec[key] for key in ("run_id", "sweep", "command", "overrides")}
        run_job(config, folder, attempt=attempt, **context)
    except Exception as error:
        if rank() == 0:
            with contextlib.suppress(OSError):  # a full disk, for one: what it led to is what the user must read
                (folder / "error.txt").write_text(traceback.format_exc())
            leave_word(folder, status_of(error), describe(error), attempt)
        raise
    if rank() == 0:
        row = last_row(folder) or {}
        _finish(folder, attempt, row.get("status") or "ok", row.get("error"))


def rank() -> int:
    """Return this process's rank as SLURM or torchrun tell it; 0 without either."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))


def leave_word(folder: Path, status: str, reason: str, attempt: int | None = None) -> None:
    """See to it that the records of a job that ended badly say so, and write its ``result.json``.

    For the job itself and, once it is dead, for the launcher. A line the job wrote itself is left alone.
    """
    row = last_row(folder)
    if row is None or row.get("status") == "ok":
        try:
            append_row(folder, _failure(folder, row or {}, status, reason), attempt)
        except (RecordError, OSError) as error:  # a full disk must not hide what went wrong before
            print(f"longstraw: {error}", file=sys.stderr)
    else:
        status, reason = row["status"], row.get("error") or reason
    try:
        _finish(folder, attempt or 0, status, reason)
    except OSError as error:  # without a result the job counts as failed
        print(f"longstraw: {error}", file=sys.stderr)


def _failure(folder: Path, row: dict[str, Any], status: str, reason: str) -> dict[str, Any]:
    spec = json.loads((folder / "spec.json").read_text())
    constants: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):  # a spec that cannot be read may be what went wrong
        constants = constant_keys(from_dict(spec["config"]))
    known = {key: row[key] for key in ("commit", "dirty", "versions", "started_at", "device_name") if row.get(key)}
    return {
        **constants,
        **startup_facts(None),
        **known,
        "run_id": spec["run_id"],
        "command": spec["command"],
        "status": status,
        "error": reason,
    }


def _finish(folder: Path, attempt: int, status: str, reason: str | None) -> None:
    result = {"attempt": attempt, "status": status, "error": reason, "host": socket.gethostname()}
    write_json(folder / "result.json", result)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in one step: a reader sees the old one or the new one, whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(beside, path)
