"""Print the capacity table: one row a job with its peak memory, from any number of record files.

    python -m analysis.capacity PATH... [--csv FILE|-] [--latex] [--figure out.png] [--paper] [--claim NAME]

A row shows what was done, not what was asked for: the positions that were evaluated, and how far the gradient went.
Keys in which the jobs differ are columns; those with one value are printed once, above the table.

A job's peak is the largest over its steps; predicted, retained and state gradient bytes are of the same step; "step
time" is the median over finished steps, "predicted time" what the longest simulated step would take (docs/time.md). One
GB is 10^9 bytes. Of each step the highest attempt counts. Jobs that failed, ran out of memory or were refused have a
row too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.cases import SETUP, differing, gradient, text
from analysis.command import parser, refuse, run
from analysis.records import Job, NoRecords, load_jobs, note
from analysis.tables import latex, markdown, read_beside, write_csv
from longstraw.tracking.schema import carried_gradient, status_word
from longstraw.units import GB, format_bytes, format_count, format_seconds

# What a job is: the same in all its rows; a row written for a dead job may not know all of it.
CASE = ["claim", "model", "hardware", "mode", "prompt_grad", "prompt_grad_window", "context", "group_size"]
_PROVENANCE = ["commit", "dirty"]
# Taken from the step with the highest peak.
_OF_PEAK = ["peak_allocated_bytes", "predicted_peak_bytes", "retained_bytes", "state_gradient_bytes"]
_OF_PEAK += ["snapshot_bytes", "peak_verb", "measured_by", "prompt_positions", "response_positions"]
_INTEGERS = ["world_size", "dp", "ep", "nodes", "simulated_rank", "prompt_grad_window", "refresh_every"]
_INTEGERS += ["context", "group_size", "chunk", "attempt", "steps", "positions"]
_WORDS = {"world_size": "ranks", "refresh_every": "refresh every", "device_name": "device"}
_BYTES = {
    "peak": "peak_allocated_bytes",
    "predicted": "predicted_peak_bytes",
    "retained": "retained_bytes",
    "state grad": "state_gradient_bytes",
}
_RIGHT = (
    "asked context",
    "positions",
    "group",
    "ratio",
    "step time",
    "predicted time",
    "ranks",
    "chunk",
    "paper GB",
    "paper seconds",
)
REASON = 48  # characters of an error that a table shows; the CSV has it whole


def summarize(job: Job) -> dict[str, Any]:
    """Return a job's row in exact values."""
    peak = max(job.steps, key=lambda row: row["peak_allocated_bytes"] or -1, default=job.last)
    seconds = [row["seconds"] for row in job.finished if row["seconds"] is not None]
    predicted = [
        sum(row["predicted_seconds_by_verb"].values()) for row in job.steps if row["predicted_seconds_by_verb"]
    ]
    summary = {key: job.known(key) for key in [*CASE, *SETUP, *_PROVENANCE]} | {key: peak[key] for key in _OF_PEAK}
    if summary["predicted_peak_bytes"] is None:  # a job refused as too large has no step, only a prediction
        summary["predicted_peak_bytes"] = job.known("predicted_peak_bytes")
    summary |= {key: str(summary[key]) for key in ("rope_scaling", "frozen") if summary[key] is not None}
    lengths = (peak["prompt_positions"], peak["response_positions"])
    summary["positions"] = None if None in lengths else sum(lengths)
    if summary["mode"] == "simulate":
        summary["device_name"] = None  # the machine that simulated is not what was simulated
    summary["prompt_grad"], summary["prompt_grad_window"] = carried_gradient(summary, peak)
    return summary | {
        "status": status_word(job.status, summary["mode"]),
        "error": job.last["error"],
        "evidence": job.last["evidence"] if summary["mode"] not in ("simulate", "emulate") else None,
        "run_id": job.run_id,
        "attempt": job.last["attempt"],
        "steps": len(job.finished),
        "seconds": statistics.median(seconds) if seconds else None,
        "predicted_seconds": max(predicted, default=None),
    }


def capacity(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return one row a job in exact values, sorted by claim, model, hardware, mode, gradient, context and group."""
    frame = pd.DataFrame([summarize(job) for job in jobs], dtype=object)
    for column in (*_INTEGERS, *(column for column in frame if str(column).endswith(("_bytes", "_positions")))):
        values = [
            int(value) if isinstance(value, int | float) and value == value else None
            for value in frame[column].astype(object)
        ]
        frame[column] = pd.array(values, dtype="Int64")  # of pandas' own conversions, those with gaps go by floats
    frame["ratio"] = (frame["predicted_peak_bytes"] / frame["peak_allocated_bytes"]).astype("Float64")
    for column in ("seconds", "predicted_seconds"):
        frame[column] = pd.array(frame[column], dtype="Float64")
    frame["peak_gb"] = (frame["peak_allocated_bytes"] / GB).astype("Float64")
    frame = frame.sort_values([*CASE, "world_size", "run_id"], key=_sortable, na_position="first", ignore_index=True)
    first = [*CASE, "positions", "status", "error", "peak_gb", *_BYTES.values(), "ratio"]
    first += ["seconds", "predicted_seconds"]
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
    """Return the table as people read it, all strings: in what the jobs differ, what they held and how they ended."""
    rows = frame.to_dict("records")
    asked = [row["context"] for row in rows if not pd.isna(row["positions"]) and row["positions"] != row["context"]]
    table = pd.DataFrame({key: frame[key].map(text) for key in ["claim"] if frame[key].notna().any()}, dtype=object)
    table["model"], table["hardware"] = frame["model"].map(text), frame["hardware"].map(text)
    for key in differing(frame, SETUP):
        table[_WORDS.get(key, key.replace("_", " "))] = frame[key].map(text)
    table["prompt grad"] = [gradient(row) for row in rows]
    if asked or frame["positions"].isna().any():
        table["asked context"] = frame["context"].map(_count)
    if not frame["positions"].isna().all():
        table["positions"] = frame["positions"].map(_count)
    table["group"] = frame["group_size"].map(text)
    table["status"] = [_status(row) for row in rows]
    for name, values in _sizes(frame).items():
        table[name] = values
    if "paper_gb" in frame:
        table["paper GB"] = frame["paper_gb"].map(lambda value: "" if pd.isna(value) else f"{value:,.3f}")
        table["paper seconds"] = frame["paper_seconds"].map(lambda v: "" if pd.isna(v) else f"{v:,.1f}")
    table["ratio"] = frame["ratio"].map(lambda value: "" if pd.isna(value) else f"{value:.3f}")
    table["step time"] = frame["seconds"].map(lambda value: "" if pd.isna(value) else format_seconds(value))
    if frame["predicted_seconds"].notna().any():
        table["predicted time"] = frame["predicted_seconds"].map(lambda s: "" if pd.isna(s) else format_seconds(s))
    table["evidence"] = frame["evidence"].map(lambda value: text(value) or "none")
    table["commit"] = [_commit(row) for row in rows]
    return table


def _sizes(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Return the columns of bytes: in GB where every peak has three digits there, else each in its own unit."""
    peaks = frame["peak_allocated_bytes"].fillna(frame["predicted_peak_bytes"]).dropna()
    large = len(peaks) > 0 and peaks.min() >= GB // 10

    def size(value: Any) -> str:
        if pd.isna(value):
            return ""
        return f"{value / GB:,.3f}" if large else format_bytes(value)

    return {f"{name} GB" if large else name: [size(value) for value in frame[key]] for name, key in _BYTES.items()}


def common(frame: pd.DataFrame) -> str:
    """Return in one line what is known and the same of all jobs and therefore no column; empty if nothing is."""
    same = [key for key in SETUP if len(set(map(text, frame[key]))) == 1 and text(frame[key].iloc[0])]
    words = [f"{_WORDS.get(key, key.replace('_', ' '))} {text(frame[key].iloc[0])}" for key in same]
    return f"In all rows: {', '.join(words)}." if words else ""


def _count(value: Any) -> str:
    return "" if pd.isna(value) else format_count(int(value))


def _status(row: dict[str, Any]) -> str:
    reason = " ".join(text(row["error"]).split())
    if not reason or row["status"] in ("ok", "simulated", "emulated"):
        return str(row["status"])
    return f"{row['status']}: {reason if len(reason) <= REASON else reason[: REASON - 3] + '...'}"


def _commit(row: dict[str, Any]) -> str:
    dirty = row["dirty"]
    return text(row["commit"])[:9] + ("+dirty" if dirty is not None and not pd.isna(dirty) and dirty else "")


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
        if not options.latex and (line := common(frame)):
            print(line + "\n")
        table = shown(frame)
        right = [name for name in table if name in _RIGHT or name.removesuffix(" GB") in _BYTES]
        print((latex if options.latex else markdown)(table, right))
    return 0


if __name__ == "__main__":
    run(main)
