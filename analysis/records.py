"""Find record files, read them even if they are damaged, and merge the attempts of each job."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.tracking import evaluations
from longstraw.tracking.schema import KEYS, SCHEMA, Key, after_last_step, fits, numbers

Row = dict[str, Any]


class NoRecords(Exception):
    """There are no records; the message says where they were looked for."""


@dataclass
class Job:
    """One job: its rows by step, the highest attempt winning, and the row that says how it ended."""

    run_id: str
    steps: list[Row]  # of all statuses, in order
    last: Row  # the last one that the highest attempt wrote, with or without a step

    @property
    def status(self) -> str:
        """How the job ended; ``unfinished`` where steps are missing: it runs, or was killed silently.

        A simulation has the steps that hold most, and no others.
        """
        step, asked = self.last["step"], self.last["steps"]
        ran = self.last["status"] == "ok" and self.last["mode"] != "simulate"
        if ran and None not in (step, asked) and step + 1 < asked:
            return "unfinished"
        return self.last["status"] or "error"

    def known(self, key: str) -> Any:
        """Return the value of ``key`` in the latest row that has one."""
        rows = [self.last, *reversed(self.steps)]
        return next((row[key] for row in rows if row[key] is not None), None)

    @property
    def finished(self) -> list[Row]:
        return [row for row in self.steps if row["status"] == "ok"]


def note(message: str) -> None:
    """Print a remark about the input on stderr, so that stdout has only the table."""
    print(f"note: {message}", file=sys.stderr)


def find_files(paths: Iterable[str | Path], kind: str = "records") -> list[Path]:
    """Return the files of ``records`` or ``evaluations`` among ``paths``: folders are searched for ``KIND*.jsonl``.

    Files are taken as given; those whose name begins with ``evaluations`` hold evaluations, all others records.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            found |= dict.fromkeys(sorted(file for file in path.rglob(f"{kind}*.jsonl") if file.is_file()))
        elif path.exists():
            if path.name.startswith("evaluations") == (kind == "evaluations"):
                found[path] = None
        else:
            raise NoRecords(f"{path} does not exist")
    return list(found)


def read_rows(path: Path, report: Callable[[str], None] = note, keys: dict[str, Key] = KEYS) -> list[Row]:
    """Return a file's rows with every key of the listing ``keys``; lines that are no rows are reported and left out.

    A row without ``run_id`` belongs to the file's folder, one without ``attempt`` to the attempt in the file's name.
    """
    match = re.fullmatch(r"(?:records|evaluations)\.(\d+)\.jsonl", path.name)
    defaults = {"run_id": str(path.parent), "attempt": int(match[1]) if match else 0}
    rows = []
    for number, line in enumerate(_content(path, report).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = numbers(json.loads(line))
        except ValueError:
            report(f"{path}:{number}: broken off, left out")
            continue
        if not isinstance(row, dict):
            report(f"{path}:{number}: no record, left out")
            continue
        full = {key: row.get(key) for key in keys}
        for key, value in full.items():
            if value is not None and not (fits(value, keys[key].type) and _within_64_bits(value)):
                kind = f"{keys[key].type.__name__} of 64 bits at most"
                report(f"{path}:{number}: {key} must be {kind}, not {value!r:.60}; taken as unknown")
                full[key] = None
        if (full["schema"] or 0) > SCHEMA:
            report(f"{path}:{number}: of schema {full['schema']}, this reads {SCHEMA}; newer keys are not shown")
        rows.append({**full, **{key: value for key, value in defaults.items() if full[key] is None}})
    return rows


def _within_64_bits(value: Any) -> bool:
    """Return whether every whole number in a value, at any depth, is one that a column of a table can hold."""
    if isinstance(value, dict | list):
        return all(map(_within_64_bits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) < 2**63


def _content(path: Path, report: Callable[[str], None]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        report(f"{path}: cannot be read ({error.strerror}), left out")
        return b""


def merge(rows: Iterable[Row]) -> list[Job]:
    """Return jobs in the order of their first row; of each step the highest attempt's row counts, then the later."""
    by_job: dict[str, list[Row]] = {}
    for row in rows:
        by_job.setdefault(row["run_id"], []).append(row)
    return [_merge_job(run_id, rows) for run_id, rows in by_job.items()]


def _merge_job(run_id: str, rows: list[Row]) -> Job:
    rows = [row for row in rows if not after_last_step(row)] or rows  # all its steps are taken
    rows = sorted(rows, key=lambda row: row["attempt"])  # stable: the order within an attempt is kept
    by_step: dict[int, Row] = {}
    for row in rows:
        if row["step"] is not None:
            by_step[row["step"]] = row
    return Job(run_id, [by_step[step] for step in sorted(by_step)], rows[-1])


def load_jobs(paths: Iterable[str | Path], claim: str | None = None) -> list[Job]:
    """Return the jobs of all record files below ``paths``, of one claim if given; raise ``NoRecords`` if none."""
    paths = list(paths)
    files = find_files(paths)
    where = ", ".join(map(str, paths))
    if not files:
        raise NoRecords(f"no records*.jsonl below {where}; a run writes one into its folder")
    rows = [row for path in files for row in read_rows(path)]
    if not rows:
        raise NoRecords(f"no record in {len(files)} file(s) below {where}")
    if claim is not None:
        claims = sorted({str(row["claim"]) for row in rows if row["claim"]})
        rows = [row for row in rows if row["claim"] == claim]
        if not rows:
            raise NoRecords(f"no record of claim={claim}; there are {', '.join(claims) or 'no claims'}")
    return merge(rows)


def load_evaluations(paths: Iterable[str | Path], claim: str | None = None) -> dict[str, list[Row]]:
    """Return the evaluations of all files below ``paths`` by run, each step once: the row of its highest attempt."""
    rows = [row for path in find_files(paths, "evaluations") for row in read_rows(path, keys=evaluations.KEYS)]
    by_run: dict[str, dict[int | None, Row]] = {}
    for row in sorted(rows, key=lambda row: row["attempt"]):
        if claim is None or row["claim"] == claim:
            by_run.setdefault(row["run_id"], {})[row["step"]] = row
    return {run: sorted(found.values(), key=lambda row: row["step"] or 0) for run, found in by_run.items()}
