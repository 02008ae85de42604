"""Tables of a rank's peak memory for the notebooks: beside the paper's, by kind, and by what is trained.

 Bytes are exact here and shown in GB of 10^9 bytes. A simulated peak is a count of what the
real step allocates for one rank on fake tensors, a measured one was allocated on a device; a table never mixes the two.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.records import Job, load_jobs
from analysis.tables import Shown, markdown, read_beside
from longstraw.config import option
from longstraw.units import GB, format_count

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
_CASE = ["claim", "model", "hardware", "mode", "context", "prompt_positions", "group_size", "prompt_grad"]
_CASE += ["refresh_every", "world_size", "state_device", "state_gradient_dtype", "status", "error"]
_OF_PEAK = ["peak_allocated_bytes", "predicted_peak_bytes", "peak_verb", "response_positions"]
_OF_JOB = ["optimizer_bytes", "host_bytes"]
_CASE_OF_RECEIPT = ["model", "group_size", "prompt_grad", "refresh_every"]
_VERBS = ("prefill", "score", "replay", "prompt_backward", "optimizer")
_WORDS = {
    "group_size": "group",
    "prompt_grad": "prompt grad",
    "world_size": "ranks",
    "state_gradient_dtype": "state gradient in",
}
_LEFT = ("model", "trained", "prompt grad", "state gradient in", "peak in")  # columns of words


def experiments(*claims: str) -> list[Job]:
    """Return the jobs whose records are committed under the named experiments."""
    return load_jobs([EXPERIMENTS / claim / "records.jsonl" for claim in claims])


def peaks(jobs: Sequence[Job]) -> pd.DataFrame:
    """Return one row a job in exact values, each with ``kinds``: what its highest step's peak consisted of."""
    rows = []
    for job in jobs:
        peak = max(job.steps, key=lambda row: row["peak_allocated_bytes"] or -1, default=job.last)
        row = {key: job.known(key) for key in _CASE} | {key: peak[key] for key in _OF_PEAK}
        row |= {key: job.known(key) for key in _OF_JOB}
        largest = [step["peak_by_verb"] or {} for step in job.steps]
        verbs = sorted({verb for each in largest for verb in each})
        row["by_verb"] = {verb: max(each.get(verb, 0) for each in largest) for verb in verbs}
        row |= {"status": job.status, "kinds": peak["peak_bytes_by_kind"] or {}, "trained": trained(job)}
        rows.append(row)
    return pd.DataFrame(rows)


def trained(job: Job) -> str:
    """Return what a job trained and what it kept for that, as its command says it."""
    typed = dict(word.split("=", 1) for word in shlex.split(job.known("command") or "") if "=" in word)
    words = ["LoRA" if job.known("adapter") == "lora" else "all parameters"]
    dtype = {"float32": "fp32", "model": "bf16"}[typed.get("optimizer.gradient_dtype", "float32")]
    words.append(f"{dtype} gradients" if words[0] != "LoRA" else "")
    optimizer = {"none": "no optimizer"}.get(typed.get("optimizer", "adamw"), "AdamW")
    words.append(f"{optimizer} in host memory" if typed.get("optimizer.device") == "cpu" else optimizer)
    return ", ".join(filter(None, words))


def beside_paper(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the paper's receipts with the simulated and the measured peak of the same case, and their ratios.

    ``frame`` is ``peaks()``'s. A case is the same where model, positions, group, prompt gradient and number of steps
    that share a prompt are; the paper counts GLM-5.2's positions without the response, its receipt says so.
    """
    rows = []
    for receipt in read_beside("paper.csv").to_dict("records"):
        keys = [*_CASE_OF_RECEIPT, "context" if pd.isna(receipt["prompt_positions"]) else "prompt_positions"]
        same = frame[(frame[keys] == pd.Series({key: receipt[key] for key in keys})).all(axis=1)]
        row: dict[str, Any] = {
            "case": receipt["receipt"],
            "model": receipt["model"],
            "gpus": f"{receipt['gpus']} x {receipt['gpu']}",
            "context": int(receipt["context"]),
            "group_size": int(receipt["group_size"]),
            "paper": None if pd.isna(receipt["peak_gb"]) else round(receipt["peak_gb"] * GB),
        }
        for name, mode in (("simulated", "simulate"), ("measured", "run")):
            peaks_of = same.loc[same["mode"] == mode, "peak_allocated_bytes"].dropna()
            row[name] = int(peaks_of.max()) if len(peaks_of) else None
        rows.append(row)
    return pd.DataFrame(rows, dtype=object)


def shown_beside_paper(frame: pd.DataFrame) -> Shown:
    """Return ``beside_paper``'s table as people read it."""
    rows = []
    for row in frame.to_dict("records"):
        paper, ours = row["paper"], row["measured"] or row["simulated"]
        rows.append(
            {
                "case": row["case"],
                "model": row["model"],
                "GPUs": row["gpus"],
                "positions": format_count(row["context"]),
                "group": str(row["group_size"]),
                "paper, measured GB": gigabytes(paper),
                "ours, simulated GB": gigabytes(row["simulated"]),
                "ours, measured GB": gigabytes(row["measured"]),
                "ours / paper": f"{ours / paper:.3f}" if ours and paper else "",
            }
        )
    table = pd.DataFrame(rows)
    return Shown(markdown(table, list(table.columns)[3:]))


def group_growth(frame: pd.DataFrame) -> Shown:
    """Return by how many bytes the peak grows from the smallest group to the largest, ours and the paper's."""
    rows = []
    for (model, context, grad), jobs in frame.groupby(["model", "context", "prompt_grad"]):
        jobs = jobs.sort_values("group_size")
        first, last = jobs.iloc[0], jobs.iloc[-1]
        paper = read_beside("paper.csv").set_index(["model", "context", "prompt_grad", "group_size"])["peak_gb"]
        cases = [(model, context, grad, row["group_size"]) for row in (first, last)]
        known = all(case in paper.index for case in cases)
        rows.append(
            {
                "model": model,
                "positions": format_count(context),
                "prompt grad": grad,
                "group": f"{first['group_size']} to {last['group_size']}",
                "paper, bytes": f"{round((paper[cases[1]] - paper[cases[0]]) * GB):,}" if known else "",
                "ours, bytes": f"{last['peak_allocated_bytes'] - first['peak_allocated_bytes']:,}",
            }
        )
    table = pd.DataFrame(rows)
    return Shown(markdown(table, list(table.columns)[3:]))


def by_kind(frame: pd.DataFrame, columns: Sequence[str]) -> Shown:
    """Return what each job's peak consisted of, in GB; ``columns`` are the keys in which the jobs differ."""
    frame, table = _begun(frame, columns)
    table["peak in"] = frame["peak_verb"].map(_text)
    table["peak GB"] = frame["peak_allocated_bytes"].map(gigabytes)
    for kind in kinds_of(frame):
        table[kind.replace("_", " ")] = [gigabytes(each.get(kind, 0)) for each in frame["kinds"]]
    return _finished(table)


def by_verb(frame: pd.DataFrame, columns: Sequence[str]) -> Shown:
    """Return the peak within each verb, in GB."""
    frame, table = _begun(frame, columns)
    for verb in _VERBS:
        if any(verb in each for each in frame["by_verb"]):
            table[verb.replace("_", " ")] = [gigabytes(each.get(verb)) for each in frame["by_verb"]]
    return _finished(table)


def _begun(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    frame = frame.sort_values([*columns], ignore_index=True)
    return frame, pd.DataFrame({_WORDS.get(key, key): [_cell(key, value) for value in frame[key]] for key in columns})


def _finished(table: pd.DataFrame) -> Shown:
    return Shown(markdown(table, [name for name in table.columns if name not in _LEFT]))


def kinds_of(frame: pd.DataFrame) -> list[str]:
    """Return the kinds that any of the jobs holds at its peak, in the records' order."""
    names = dict.fromkeys(kind for kinds in frame["kinds"] for kind in kinds)
    return [kind for kind in names if any(kinds.get(kind) for kinds in frame["kinds"])]


def room(hardware: str) -> float:
    """Return the bytes of one device that a step may take: its memory less what is kept for context and NCCL."""
    values = option("hardware", hardware)
    return (values["memory_gb"] - values["reserve_gb"]) * GB


def gigabytes(value: Any) -> str:
    """Return bytes as GB with three decimals; nothing for what is not known."""
    return "" if value is None or pd.isna(value) else f"{value / GB:,.3f}"


def _cell(key: str, value: Any) -> str:
    return format_count(int(value)) if key == "context" else _text(value)


def _text(value: Any) -> str:
    return "" if value is None or pd.isna(value) else str(value)
