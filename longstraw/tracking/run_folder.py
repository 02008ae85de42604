"""Read the files of a job's run folder (records, spec, progress, result), and write the JSON ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longstraw.runtime.whole_files import write_whole
from longstraw.tracking.evaluations import evaluations_path
from longstraw.tracking.recorder import latest_attempt, records_path
from longstraw.tracking.schema import after_last_step, numbers


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of a job's latest attempt; a line that was torn by a kill is passed over."""
    attempt = latest_attempt(run_dir)
    if attempt is None:
        return []
    return read_lines(records_path(run_dir, attempt))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of one file."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            rows.append(numbers(json.loads(line)))
        except json.JSONDecodeError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def read_steps(run_dir: Path, *, every: bool = False) -> list[dict[str, Any]]:
    """Return a job's records over all attempts, each step once: the row of the latest attempt that did it.

    With ``every``, also rows of steps that were repeated later, and of attempts that were asked to end.
    """
    kept: list[dict[str, Any]] = []
    for attempt in range((latest_attempt(run_dir) or 0) + 1):
        path = records_path(run_dir, attempt)
        rows = read_lines(path) if path.exists() else []
        if path.exists() and not every:  # an attempt that had only an evaluation left writes no row
            kept = [row for row in kept if not after_last_step(row)]
        if rows and not every:
            first = min((row["step"] for row in rows if row.get("step") is not None), default=None)
            kept = [row for row in kept if row.get("status") == "ok" and (first is None or row.get("step", -1) < first)]
        kept += rows
    return kept


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return a job's evaluations over all attempts, each step once, in the order of their steps."""
    paths = [evaluations_path(run_dir, attempt) for attempt in range((latest_attempt(run_dir) or 0) + 1)]
    rows = {row.get("step"): row for path in paths if path.exists() for row in read_lines(path)}
    return sorted(rows.values(), key=lambda row: row.get("step") or 0)


def last_row(run_dir: Path) -> dict[str, Any] | None:
    """Return a job's last record, or ``None``."""
    rows = read_rows(run_dir)
    return rows[-1] if rows else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a small JSON file's content; empty where there is none or it is being written."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def progress_place(progress: dict[str, Any], of: str = "") -> str:
    """Return where a job is by its progress file: ``step 3``, or ``after step 2`` in an evaluation; ``of`` follows."""
    step = progress.get("step", 0)
    return f"after step {step}{of}" if progress["verb"] == "evaluate" else f"step {step + 1}{of}"


def has_result(run_dir: Path) -> bool:
    """Return whether a job has a final result; a preempted job has none."""
    return read_json(run_dir / "result.json").get("status") not in (None, "preempted")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in one step: a reader sees the old one or the new one, whole."""
    write_whole(path, json.dumps(content, indent=1) + "\n")
