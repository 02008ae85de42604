"""The table that a command prints when its jobs are over: one row a job, read from the run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longstraw.tracking.run_folder import read_evaluations, read_json, read_steps
from longstraw.tracking.schema import carried_gradient, status_word
from longstraw.units import format_bytes, format_seconds

COLUMNS = ("job", "model", "positions", "group_size", "prompt_grad", "status", "peak", "total time", "loss")
LEFT = ("job", "model", "prompt_grad", "status")  # columns of text


def table(run_dirs: Sequence[Path], *, errors: bool = True) -> str:
    """Return the table of a command's jobs, one row each (worst peak, all seconds, last loss), then their errors."""
    rows, reasons, notes = [], [], []
    for run_dir in run_dirs:
        records = read_steps(run_dir)
        config = read_json(run_dir / "spec.json").get("config", {})
        rows.append(_cells(run_dir.name, config, records))
        if records and records[-1].get("error"):
            reasons.append(f"job {run_dir.name}: {records[-1]['status']}: {records[-1]['error']}")
        notes += _notes(run_dir.name, config, records) + _evaluated(run_dir)
    head = dict(zip(COLUMNS, COLUMNS, strict=True))
    return "\n".join([aligned([head, *rows], COLUMNS, LEFT), *dict.fromkeys(notes), *(reasons if errors else [])])


def _notes(name: str, config: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    """Return notes that explain a loss or gradient of 0."""
    notes = []
    equal = sum(row.get("reward_std") == 0 for row in records)
    if equal and not config.get("algorithm", {}).get("kl_coef"):
        notes.append(f"job {name}: equal rewards in {equal} of {len(records)} steps: no gradient in those")
    if records and records[-1].get("advantage_abs_mean") and _loss(records[-1]) == "0":
        notes.append("loss 0: on policy each ratio is 1 and the advantages sum to 0; grad_norm is not 0")
    return notes


def _evaluated(run_dir: Path) -> list[str]:
    """Return what a job's evaluations came to, in one line."""
    found = [row for row in read_evaluations(run_dir) if row.get("success") is not None]
    if not found:
        return []
    first, last = found[0], found[-1]
    before = f", {first['success']:.3f} after {first['step']}" if first is not last else ""
    told = f"success {last['success']:.3f} on {last['examples']} held-out prompts after {last['step']} steps{before}"
    return [f"job {run_dir.name}: {told}"]


def _loss(row: dict[str, Any]) -> str:
    """Return a loss as text, ``0`` if it is only rounding: on policy it is the sum of advantages, which is 0."""
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
    """Return the rows as text with aligned columns; those in ``left`` are aligned left, the others right."""
    widths = {key: max(len(row[key]) for row in rows) for key in columns}
    lines = []
    for row in rows:
        cells = (row[key].ljust(widths[key]) if key in left else row[key].rjust(widths[key]) for key in columns)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
