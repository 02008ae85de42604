"""Runs read from their records for learning curves: their names, points and cells of depth by length."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.cases import SETUP, differing, gradient, text
from analysis.records import Job, NoRecords, Row, load_evaluations, load_jobs, note
from longstraw.tracking.evaluations import cells, depth_label, interval_kind, length_labels
from longstraw.tracking.schema import status_word
from longstraw.units import format_seconds

# Of these a run's name has those in which the runs differ.
_NAMING = ["claim", "model", "weights", "hardware", "prompt gradient", "context", "group_size", "rollout"]
_NAMING += ["temperature", *(key for key in SETUP if key not in ("device_name", "nodes")), "seed"]
_WORDS = {"group_size": "group {}", "learning_rate": "lr {}", "world_size": "{} ranks", "temperature": "T {}"}
_WORDS |= {"refresh_every": "{} steps a prompt"}
_WORDS |= {key: f"{key} {{}}" for key in ("seed", "chunk", "context", "dp", "ep")}
COLUMNS = ["run_id", "run", "kind", "step", "seconds", "value", "low", "high", "examples", "interval"]


@dataclass
class Run:
    """One run: its training, its evaluations by step, or one of both; ``name`` tells it from the others."""

    run_id: str
    job: Job | None
    evaluations: list[Row]
    name: str = ""

    @property
    def status(self) -> str:
        return "evaluated" if self.job is None else status_word(self.job.status, self.job.known("mode"))

    def known(self, key: str) -> Any:
        """Return what the run's records, or its evaluations, say of ``key``."""
        said = None if self.job is None or key not in self.job.last else self.job.known(key)
        return next((row[key] for row in self.evaluations if row.get(key) is not None), None) if said is None else said

    def points(self) -> list[dict[str, Any]]:
        """Return the rows of ``COLUMNS`` of training and held-out prompts, in the order of the steps."""
        ends = self._ends()
        shared = {"run_id": self.run_id, "run": self.name}
        found = []
        for row in [] if self.job is None else self.job.steps:
            if row["reward_mean"] is not None and row["rollout"] != "golden":  # warm-up: no responses of the policy
                at = {"step": row["step"], "seconds": ends.get(row["step"])}
                found.append({**shared, "kind": "training", **at, "value": row["reward_mean"]})
        for row in self.evaluations:
            seconds = 0.0 if row["step"] == 0 else ends.get((row["step"] or 0) - 1)
            values = {"value": row["success"], "low": row["success_low"], "high": row["success_high"]}
            values |= {"examples": row["examples"], "interval": row["interval"]}
            found.append({**shared, "kind": "held-out", "step": row["step"], "seconds": seconds, **values})
        return found

    def _ends(self) -> dict[int, float]:
        """Return the seconds of all steps up to each step's end, as far as every step before it is recorded."""
        ends: dict[int, float] = {}
        total = 0.0
        for step, row in enumerate([] if self.job is None else self.job.steps):
            seconds = row["seconds"]
            if row["step"] != step or seconds is None or not math.isfinite(seconds):
                break
            total += seconds
            ends[step] = total
        return ends


def load_runs(paths: Sequence[str], claim: str | None = None) -> list[Run]:
    """Return the runs that have records or evaluations below ``paths``, named; raise ``NoRecords`` if none has."""
    evaluations = load_evaluations(paths, claim)
    try:
        jobs = {job.run_id: job for job in load_jobs(paths, claim)}
    except NoRecords:
        if not evaluations:
            raise
        jobs = {}
    every = dict.fromkeys([*jobs, *evaluations])
    runs = [Run(run_id, jobs.get(run_id), evaluations.get(run_id, [])) for run_id in every]
    _name(runs)
    return runs


def _name(runs: Sequence[Run]) -> None:
    """Name each run by what it differs in from the others, and by its id where that is the same."""
    said = []
    for one in runs:
        row = {key: one.known(key) for key in _NAMING if key != "prompt gradient"}
        row["prompt gradient"] = gradient({key: one.known(key) for key in ("prompt_grad", "prompt_grad_window")})
        said.append({key: str(value) if isinstance(value, dict | list) else value for key, value in row.items()})
    frame = pd.DataFrame(said, columns=_NAMING, dtype=object)
    apart = differing(frame, _NAMING)
    for one, row in zip(runs, said, strict=True):
        words = [_WORDS.get(key, "{}").format(_value(key, row[key])) for key in apart if text(row[key])]
        one.name = ", ".join(words) or text(row["model"]) or one.run_id
    names = [one.name for one in runs]
    for one in runs:
        if names.count(one.name) > 1:
            one.name += f" ({re.sub('-[0-9a-f]{16}', '', one.run_id)})"


def _value(key: str, value: Any) -> str:
    return f"{value:,}" if key in ("context", "chunk") else text(value)


def learning(runs: Sequence[Run]) -> pd.DataFrame:
    """Return every point of the curves, ``COLUMNS``; values that are not finite are left out and said."""
    points = [point for one in runs for point in one.points()]
    finite = [p for p in points if p["value"] is not None and math.isfinite(p["value"])]
    for one in runs:
        lost = sum(p["run_id"] == one.run_id for p in points) - sum(p["run_id"] == one.run_id for p in finite)
        if lost:
            note(f"{one.name}: {lost} values are missing or not finite, and left out")
    frame = pd.DataFrame(finite, columns=COLUMNS)
    numbers = ["step", "seconds", "value", "low", "high"]
    return frame.assign(**{key: pd.to_numeric(frame[key], errors="coerce") for key in numbers})


def shown(runs: Sequence[Run], frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row a run as people read it, all strings."""
    table = []
    for one in runs:
        mine = frame[frame["run_id"] == one.run_id]
        training, held = mine[mine["kind"] == "training"], mine[mine["kind"] == "held-out"]
        tenth = max(round(len(training) / 10), 1)
        times = [] if one.job is None else [row["seconds"] for row in one.job.finished if row["seconds"] is not None]
        table.append(
            {
                "run": one.name,
                "status": one.status,
                "steps": "" if one.job is None else str(len(one.job.finished)),
                "time": format_seconds(sum(times)) if times else "",
                "reward at first": _mean(training["value"][:tenth]),
                "reward at last": _mean(training["value"][-tenth:]),
                "held-out at first": _success(held, 0),
                "held-out at last": _success(held, -1),
                "prompts": "" if held.empty else f"{int(held['examples'].iloc[-1])}",
                "interval": "" if held.empty else text(held["interval"].iloc[-1]),
            }
        )
    return pd.DataFrame(table)


def _mean(values: pd.Series) -> str:
    return "" if values.empty else f"{values.mean():.3f}"


def _success(held: pd.DataFrame, at: int) -> str:
    """Return success with its interval and the step, of the evaluation number ``at``."""
    if held.empty:
        return ""
    row = held.iloc[at]
    ends = "" if pd.isna(row["low"]) else f" [{row['low']:.3f}, {row['high']:.3f}]"
    return f"{row['value']:.3f}{ends}" + ("" if pd.isna(row["step"]) else f" at {row['step']:.0f}")


def depth_by_length(one: Run) -> dict[tuple[str, str], dict[str, Any]]:
    """Return success by depth and length in a run's last evaluation; empty where no depth is known."""
    answers = one.evaluations[-1]["answers"] or [] if one.evaluations else []
    known = [
        (answer["depth"], answer["length"], answer["reward"])
        for answer in answers
        if isinstance(answer, dict) and all(_is_number(answer.get(key)) for key in ("depth", "length", "reward"))
    ]
    label = length_labels(length for _, length, _ in known)
    told = (((depth_label(depth), label(length)), reward) for depth, length, reward in sorted(known))
    return cells(told, interval_kind(reward for *_, reward in known))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def in_order(labels: Iterable[str]) -> list[str]:
    """Return the labels of lengths, each once, by their numbers."""
    return sorted(set(labels), key=lambda label: int(label.partition("-")[0]))


def depth_table(runs: Iterable[Run]) -> pd.DataFrame:
    """Return success by depth (rows) and length (columns), with the number of prompts, for each run that has depths."""
    found = {one.name: depth_by_length(one) for one in runs}
    lengths = sorted(
        {length for by in found.values() for _, length in by}, key=lambda label: int(label.partition("-")[0])
    )
    table = []
    for name, by in found.items():
        for depth in dict.fromkeys(depth for depth, _ in by):
            row = {length: by.get((depth, length)) for length in lengths}
            cell = {k: "" if c is None else f"{c['success']:.2f} ({c['examples']})" for k, c in row.items()}
            table.append({"run": name, "depth": depth, **{f"{length} tokens": cell[length] for length in lengths}})
    return pd.DataFrame(table)
