"""Write how a job ended: ``result.json``, and the last record if the job could not write it itself."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

from longstraw.config import from_dict
from longstraw.tracking.constants import constant_keys
from longstraw.tracking.provenance import startup_facts
from longstraw.tracking.recorder import append_row, latest_attempt
from longstraw.tracking.run_folder import last_row, write_json
from longstraw.tracking.schema import RecordError


def record_failure(
    folder: Path, status: str, reason: str, attempt: int | None = None, failed_rank: int | None = None
) -> None:
    """Record that a job failed, unless its own records say so already, and write its ``result.json``.

    Called by the job itself or, if it was killed, by the launcher. Rows of attempts before ``attempt`` do not count as
    the job's own. Writes nothing once a later attempt has begun.
    """
    if attempt is not None and (latest_attempt(folder) or 0) > attempt:
        return
    row = last_row(folder)
    earlier = row is not None and attempt is not None and (row.get("attempt") or 0) < attempt
    if row is None or earlier or row.get("status") == "ok":
        try:
            append_row(folder, _failure(folder, row or {}, status, reason, failed_rank), attempt)
        except (RecordError, OSError) as error:  # a full disk must not hide the first error
            print(f"longstraw: {error}", file=sys.stderr)
    else:
        known = row.get("error") or reason
        status, reason = row["status"], f"{reason}; {known}" if row["status"] == "preempted" else known
    try:
        write_result(folder, latest_attempt(folder) or 0 if attempt is None else attempt, status, reason)
    except OSError as error:  # without a result the job counts as failed
        print(f"longstraw: {error}", file=sys.stderr)


def _failure(folder: Path, row: dict[str, Any], status: str, reason: str, failed_rank: int | None) -> dict[str, Any]:
    spec = json.loads((folder / "spec.json").read_text())
    constants: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # collecting them may be what failed
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
        "failed_rank": failed_rank,
    }


def write_result(folder: Path, attempt: int, status: str, reason: str | None) -> None:
    if (latest_attempt(folder) or 0) > attempt:  # a later attempt has begun and writes its own
        return
    result = {"attempt": attempt, "status": status, "error": reason, "host": socket.gethostname()}
    write_json(folder / "result.json", result)
