"""What fits where: one row a job, from any number of record files.

    python -m analysis.capacity PATH... [--csv FILE|-] [--latex] [--figure out.png] [--paper] [--claim NAME]

A job's peak is the largest over its steps, and what is said of that peak (predicted, retained, state gradient) is of
the same step; its seconds are the median over finished steps. One GB is 10^9 bytes. Of each step the highest attempt
counts. Jobs that failed, ran out of memory or were refused have their row too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.command import parser, refuse, run
from analysis.records import Job, NoRecords, load_jobs, note
from analysis.tables import latex, markdown, read_beside, write_csv
from longstraw.units import GB, format_count

# The same in all rows of a job; a row written for a dead job may not know all of it.
_CASE = ["claim", "model", "hardware", "mode", "prompt_grad", "prompt_grad_window", "context", "group_size", "chunk"]
_SAME = [*_CASE, "device_name", "world_size", "adapter", "algorithm", "refresh_every", "commit", "dirty"]
# Taken from the step with the highest peak.
_OF_PEAK = ["peak_allocated_bytes", "predicted_peak_bytes", "retained_bytes", "state_gradient_bytes"]
_OF_PEAK += ["snapshot_bytes", "peak_verb", "measured_by"]
_INTEGERS = ["world_size", "prompt_grad_window", "refresh_every", "context", "group_size", "chunk", "attempt", "steps"]
_RIGHT = ("context", "group", "chunk", "peak GB", "predicted GB", "ratio", "retained GB", "state grad GB", "seconds")
REASON = 48  # characters of an error that a table shows; the CSV has it whole


def summarize(job: Job) -> dict[str, Any]:
    """Return a job's row in exact values."""
    peak = max(job.steps, key=lambda row: row["peak_allocated_bytes"] or -1, default=job.last)
    seconds = [row["seconds"] for row in job.finished if row["seconds"] is not None]
    summary = {key: job.known(key) for key in _SAME} | {key: peak[key] for key in _OF_PEAK}
    if summary["predicted_peak_bytes"] is None:  # a job refused as too large has no step, only a prediction
        summary["predicted_peak_bytes"] = job.known("predicted_peak_bytes")
    return summary | {
        "status": job.status,
        "error": job.last["error"],
        "evidence": job.last["evidence"],
        "run_id": job.run_id,
        "attempt": job.last["attempt"],
        "steps": len(job.finished),
        "seconds": statistics.median(seconds) if seconds else None,
    }


def capacity(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return one row a job in exact values, sorted by claim, model, hardware, mode, gradient, context and group."""
    frame = pd.DataFrame([summarize(job) for job in jobs], dtype=object)
    for column in (*_INTEGERS, *(column for column in frame if str(column).endswith("_bytes"))):
        values = [
            int(value) if isinstance(value, int | float) and value == value else None
            for value in frame[column].astype(object)
        ]
        frame[column] = pd.array(values, dtype="Int64")  # of pandas' own conversions, those with gaps go by floats
    frame["ratio"] = (frame["predicted_peak_bytes"] / frame["peak_allocated_bytes"]).astype("Float64")
    frame["seconds"] = pd.array(frame["seconds"], dtype="Float64")
    frame["peak_gb"] = (frame["peak_allocated_bytes"] / GB).astype("Float64")
    frame = frame.sort_values([*_CASE, "run_id"], key=_sortable, na_position="first", ignore_index=True)
    first = [*_CASE, "status", "error", "peak_gb", "peak_allocated_bytes", "predicted_peak_bytes", "ratio"]
    return frame[first + [column for column in frame.columns if column not in first]]


def _sortable(column: pd.Series) -> pd.Series:
    return column if pd.api.types.is_numeric_dtype(column) else column.astype("string")


def with_paper(frame: pd.DataFrame) -> pd.DataFrame:
    """Add what the paper reports for the same model, positions, group and gradient: ``paper_gb``, ``paper_seconds``."""
    keys = ["model", "context", "group_size", "prompt_grad"]
    paper = read_beside("paper.csv")
    paper = paper.astype({"context": "Int64", "group_size": "Int64"})[[*keys, "peak_gb", "seconds", "source"]]
    paper = paper.rename(columns={"peak_gb": "paper_gb", "seconds": "paper_seconds", "source": "paper_source"})
    merged = frame.merge(paper, on=keys, how="left", sort=False)
    if merged["paper_source"].isna().all():
        note("no job has the paper's model, positions and group; it reports context=2Mi with group_size=2 and 8")
    return merged


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table as people read it, all strings."""
    smallest = frame["peak_allocated_bytes"].fillna(frame["predicted_peak_bytes"]).fillna(GB).min()
    digits = 3 if smallest >= GB else 5  # tiny models live in megabytes

    def gigabytes(value: Any) -> str:
        return "" if pd.isna(value) else f"{value / GB:,.{digits}f}"

    table = pd.DataFrame(
        {
            "model": frame["model"].map(_text),
            "hardware": frame["hardware"].map(_text),
            "mode": frame["mode"].map(_text),
            "prompt grad": [_gradient(row) for row in frame.to_dict("records")],
            "context": frame["context"].map(lambda value: "" if pd.isna(value) else format_count(int(value))),
            "group": frame["group_size"].map(_text),
            "chunk": frame["chunk"].map(_text),
            "status": [_status(row) for row in frame.to_dict("records")],
            "peak GB": frame["peak_allocated_bytes"].map(gigabytes),
            "predicted GB": frame["predicted_peak_bytes"].map(gigabytes),
            "ratio": frame["ratio"].map(lambda value: "" if pd.isna(value) else f"{value:.3f}"),
            "retained GB": frame["retained_bytes"].map(gigabytes),
            "state grad GB": frame["state_gradient_bytes"].map(gigabytes),
            "seconds": frame["seconds"].map(lambda value: "" if pd.isna(value) else f"{value:,.2f}"),
            "evidence": frame["evidence"].map(_text),
            "commit": [_commit(row) for row in frame.to_dict("records")],
        }
    )
    if frame["claim"].notna().any():
        table.insert(0, "claim", frame["claim"].map(_text))
    if "paper_gb" in frame:
        place = list(table.columns).index("peak GB")
        paper = frame["paper_gb"].map(lambda value: "" if pd.isna(value) else f"{value:,.3f}")
        table.insert(place + 1, "paper GB", paper)
        table["paper seconds"] = frame["paper_seconds"].map(lambda v: "" if pd.isna(v) else f"{v:,.1f}")
    return table


def _text(value: Any) -> str:
    return "" if value is None or pd.isna(value) else str(value)


def _gradient(row: dict[str, Any]) -> str:
    window = row["prompt_grad_window"]
    return _text(row["prompt_grad"]) + ("" if pd.isna(window) else f", last {format_count(int(window))}")


def _status(row: dict[str, Any]) -> str:
    if row["status"] == "ok" and row["mode"] == "simulate":
        return "simulated"  # ok says that it ran
    reason = " ".join(_text(row["error"]).split())
    if row["status"] == "ok" or not reason:
        return str(row["status"])
    return f"{row['status']}: {reason if len(reason) <= REASON else reason[: REASON - 3] + '...'}"


def _commit(row: dict[str, Any]) -> str:
    dirty = row["dirty"]
    return _text(row["commit"])[:9] + ("+dirty" if dirty is not None and not pd.isna(dirty) and dirty else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 0, or 2 if there is nothing to tabulate."""
    known = parser("capacity", __doc__, paper="add what the paper reports for the same case")
    known.add_argument("--figure", metavar="FILE", help="draw peak against context and against group size")
    options = known.parse_args(arguments)
    try:
        frame = capacity(load_jobs(options.paths, options.claim))
    except NoRecords as error:
        return refuse("capacity", error)
    if options.paper:
        frame = with_paper(frame)
    try:
        if options.csv:
            write_csv(frame, options.csv)
        if options.figure:
            from analysis.figures import draw_capacity

            draw_capacity(frame, options.figure)
    except (OSError, ValueError) as error:  # matplotlib's for a suffix it does not know
        return refuse("capacity", error)
    if options.csv != "-":
        print((latex if options.latex else markdown)(shown(frame), (*_RIGHT, "paper GB", "paper seconds")))
    return 0


if __name__ == "__main__":
    run(main)
