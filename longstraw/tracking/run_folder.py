"""What is in a job's folder: its last record, its progress, and the table at the end of a command."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longstraw.tracking.recorder import latest_attempt, records_path
from longstraw.tracking.schema import carried_gradient, numbers, status_word
from longstraw.units import format_bytes, format_seconds

COLUMNS = ("job", "model", "positions", "group_size", "prompt_grad", "status", "peak", "total time", "loss")
LEFT = ("job", "model", "prompt_grad", "status")  # columns of words


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
    """Return a job's records over all its attempts, each step once, as the last attempt to do it has it.

    With ``every`` line also those of steps that were done again, and of attempts that were asked to end.
    """
    kept: list[dict[str, Any]] = []
    for attempt in range((latest_attempt(run_dir) or 0) + 1):
        path = records_path(run_dir, attempt)
        rows = read_lines(path) if path.exists() else []
        if rows and not every:
            first = min((row["step"] for row in rows if row.get("step") is not None), default=None)
            kept = [row for row in kept if row.get("status") == "ok" and (first is None or row.get("step", -1) < first)]
        kept += rows
    return kept


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


def has_result(run_dir: Path) -> bool:
    """Return whether a job has said how it ended; one that was preempted has not ended."""
    return read_json(run_dir / "result.json").get("status") not in (None, "preempted")


def table(run_dirs: Sequence[Path], *, errors: bool = True) -> str:
    """Return the table of a command's jobs, one row each (worst peak, all seconds, last loss), then their errors."""
    rows, reasons, notes = [], [], []
    for run_dir in run_dirs:
        records = read_steps(run_dir)
        config = read_json(run_dir / "spec.json").get("config", {})
        rows.append(_cells(run_dir.name, config, records))
        if records and records[-1].get("error"):
            reasons.append(f"job {run_dir.name}: {records[-1]['status']}: {records[-1]['error']}")
        notes += _notes(run_dir.name, config, records)
    head = dict(zip(COLUMNS, COLUMNS, strict=True))
    return "\n".join([aligned([head, *rows], COLUMNS, LEFT), *dict.fromkeys(notes), *(reasons if errors else [])])


def _notes(name: str, config: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    """Return what explains a loss or a gradient of 0."""
    notes = []
    equal = sum(row.get("reward_std") == 0 for row in records)
    if equal and not config.get("algorithm", {}).get("kl_coef"):
        notes.append(f"job {name}: equal rewards in {equal} of {len(records)} steps: no gradient in those")
    if records and records[-1].get("advantage_abs_mean") and _loss(records[-1]) == "0":
        notes.append("loss 0: on policy each ratio is 1 and the advantages sum to 0; grad_norm is not 0")
    return notes


def _loss(row: dict[str, Any]) -> str:
    """Return a loss as text: 0 where it is below the rounding of the sum of advantages that it is on policy."""
    rounding = 1e-6 * (row.get("advantage_abs_mean") or 0.0)
    return "0" if abs(row["loss"]) <= rounding else f"{row['loss']:.6g}"


def _cells(name: str, config: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, str]:
    last = records[-1] if records else {}
    peaks = [row["peak_allocated_bytes"] for row in records if row.get("peak_allocated_bytes") is not None]
    seconds = [row["seconds"] for row in records if row.get("seconds") is not None]
    losses = [_loss(row) for row in records if row.get("loss") is not None]
    grad, window = carried_gradient(config, last)
    prompt, response = last.get("prompt_positions"), last.get("response_positions")
    positions = config.get("context", 0) if prompt is None or response is None else prompt + response
    return {
        "job": name,
        "model": str(config.get("model", {}).get("name", "")),
        "positions": f"{positions:,}",
        "group_size": str(config.get("group_size", "")),
        "prompt_grad": f"{grad or ''}{'' if window is None else f', last {window:,}'}",
        "status": status_word(last.get("status", "not run"), last.get("mode")),
        "peak": format_bytes(max(peaks)) if peaks else "",
        "total time": format_seconds(sum(seconds)) if seconds else "",
        "loss": losses[-1] if losses else "",
    }


def aligned(rows: Sequence[dict[str, str]], columns: Sequence[str], left: Sequence[str]) -> str:
    """Return rows of text under each other; the columns in ``left`` begin at the left, others end at the right."""
    widths = {key: max(len(row[key]) for row in rows) for key in columns}
    lines = []
    for row in rows:
        cells = (row[key].ljust(widths[key]) if key in left else row[key].rjust(widths[key]) for key in columns)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in one step: a reader sees the old one or the new one, whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
