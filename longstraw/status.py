"""Show the states of jobs on SLURM or this machine, and resume failed ones: ``python -m longstraw.status PATH``.

PATH is the folder a command printed, or one job's folder in it. This writes the last record of a job that was killed
together with the command that started it. ``--again`` starts jobs again that failed or were cancelled.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.config import ConfigError
from longstraw.launch.jobs import launch, resume_jobs
from longstraw.launch.logs import failed_tail, log_path, tail
from longstraw.launch.manifest import Entry, find_entry, read_manifest
from longstraw.launch.result import record_failure
from longstraw.launch.slurm import LAG_SECONDS, WAITING, Known, Queue, advice
from longstraw.launch.spec import SPEC
from longstraw.runtime.process_info import is_copy, is_running
from longstraw.tracking.job_table import aligned
from longstraw.tracking.run_folder import has_result, progress_place, read_json, read_steps
from longstraw.units import format_bytes, format_seconds

COLUMNS = ("job", "state", "preempted", "step", "positions", "peak bytes", "doing", "log")
LEFT = ("job", "state", "doing", "log")
FRESH_SECONDS = 3600  # a job on another machine without progress for so long may be dead
KILLED = "the process was killed from outside, or by the kernel because memory ran out"
COPIED = "this folder is a copy, made before the job ended"


@dataclass
class Status:
    """One job: ``state`` is pending, running, done, failed, preempted or unknown."""

    entry: Entry
    state: str = "unknown"
    preempted: int = 0
    note: str = ""

    @property
    def run_dir(self) -> Path:
        return self.entry.run_dir

    @property
    def slurm(self) -> bool:
        return self.entry.executor == "slurm"

    @property
    def may_have_ended(self) -> bool:
        """Whether nothing that can be seen from here runs this job, or will."""
        if self.state == "pending":
            return not self.slurm and not (self.entry.launcher and is_running(self.entry.launcher))
        return self.state == "unknown"

    def row(self) -> dict[str, str]:
        """Return the job's cells in the table."""
        config = read_json(self.run_dir / "spec.json").get("config", {})
        rows = read_steps(self.run_dir)
        done = [row for row in rows if row.get("status") == "ok"]
        peaks = [row["peak_allocated_bytes"] for row in rows if row.get("peak_allocated_bytes") is not None]
        last = done[-1] if done else {}
        sizes = [last[key] for key in ("prompt_positions", "response_positions") if last.get(key) is not None]
        path = log_path(self.entry)
        return {
            "job": self.entry.name,
            "state": self.state,
            "preempted": str(self.preempted or ""),
            "step": f"{last.get('step', -1) + 1}/{config.get('steps', '?')}",
            "positions": f"{sum(sizes):,}" if len(sizes) == 2 else "",
            "peak bytes": format_bytes(max(peaks)) if peaks else "",
            "doing": self.note or self._doing(),
            "log": os.path.relpath(path) if path is not None else "",
        }

    def _doing(self) -> str:
        now = read_json(self.run_dir / "progress.json")
        if self.state != "running" or not {"verb", "done", "total"} <= set(now):
            return ""
        counts = f" {now['done']:,}/{now['total']:,}" if now["total"] else ""
        return f"{progress_place(now)} {now['verb']}{counts}"


def find_jobs(path: Path) -> list[Status]:
    """Return the jobs of a command's folder, or the one of a job's folder; raise ``FileNotFoundError`` for others."""
    entries = [find_entry(path)] if (path / SPEC).exists() else read_manifest(path)
    if not entries:
        known = sorted(path.glob("**/sweep.json"), key=lambda found: found.stat().st_mtime)
        hint = f"; the newest below it is {known[-1].parent}" if known else ""
        raise FileNotFoundError(f"{path} is no folder of jobs: it has no sweep.json{hint}")
    return [Status(entry) for entry in entries]


def look(jobs: Sequence[Status]) -> str:
    """Update the states of the jobs; return SLURM's error if it does not answer."""
    queue = Queue()
    known = {job.run_dir: queue.look(str(job.entry.job_id)) for job in jobs if job.slurm}
    deadline = time.monotonic() + LAG_SECONDS
    for job in jobs:
        if not job.slurm:
            _look_here(job)
            continue
        over = known[job.run_dir].over or (known[job.run_dir].state == "UNKNOWN" and not queue.trouble)
        while over and not has_result(job.run_dir) and time.monotonic() < deadline:
            time.sleep(0.5)  # a shared file system shows late what a node wrote
        _look_slurm(job, known[job.run_dir], over, queue.trouble)
    return queue.trouble


def _look_slurm(job: Status, known: Known, over: bool, trouble: str) -> None:
    job.preempted = max(known.restarts, _preempted(job.run_dir))
    if over and not has_result(job.run_dir):
        state = known.state if known.over else "it knows the job no more"
        attempt = read_json(job.run_dir / "spec.json").get("first_attempt", 0) + known.restarts
        record_failure(job.run_dir, "error", f"the job ended without a record of why (SLURM: {state})", attempt)
    if known.state in WAITING:  # also one whose other ranks ended when a node was lost: SLURM starts it again
        job.state, job.note = "pending", advice(known.reason)
    elif over or has_result(job.run_dir):
        job.state = _ended(job.run_dir)
    elif trouble:
        job.note = "SLURM does not answer"
    else:
        job.state = "running"


def _look_here(job: Status) -> None:
    """Set the state of a job of this machine; record the end of one whose process is gone."""
    job.preempted = _preempted(job.run_dir)
    process = read_json(job.run_dir / "process.json")
    if read_json(job.run_dir / "result.json"):
        job.state = _ended(job.run_dir)
        return
    if not process:
        launcher = job.entry.launcher
        if launcher and is_running(launcher) is False:
            _record_end(job, "the command that was to start it was killed")
        else:
            job.state, job.note = "pending", f"{_named(launcher)} starts it" if launcher else "not begun"
        return
    copied = is_copy(job.run_dir, process.get("folder"))
    alive = False if copied else is_running(process)
    files = [job.run_dir / name for name in ("process.json", "progress.json")]
    age = time.time() - max(path.stat().st_mtime for path in files if path.exists())
    if alive is None and age >= FRESH_SECONDS and process["host"] == socket.gethostname():
        alive = False  # of a container that is gone
    if alive is False:
        _record_end(job, COPIED if copied else KILLED)
    elif alive or age < FRESH_SECONDS:
        job.state, job.note = "running", "" if alive else f"on {process['host']}"
    else:
        job.note = f"on {process['host']}, which cannot be asked; no progress for {format_seconds(age)}"


def _named(identity: Mapping[str, Any]) -> str:
    return f"process {identity.get('pid')} on {identity.get('host')}"


def _record_end(job: Status, reason: str) -> None:
    if not read_json(job.run_dir / "result.json"):  # it may have ended by itself a moment ago
        record_failure(job.run_dir, "error", reason)
    job.state = _ended(job.run_dir)


def _ended(run_dir: Path) -> str:
    status = read_json(run_dir / "result.json").get("status")
    return {"ok": "done", "preempted": "preempted"}.get(str(status), "failed")


def _preempted(run_dir: Path) -> int:
    """Return how many attempts were asked to end, as far as they could write that down."""
    return sum(row.get("status") == "preempted" for row in read_steps(run_dir, every=True))


def report(jobs: Sequence[Status]) -> str:
    """Return the table of the jobs, then how those that failed ended."""
    rows = [dict(zip(COLUMNS, COLUMNS, strict=True)), *(job.row() for job in jobs)]
    ends = []
    for job in jobs:
        if job.state in ("failed", "preempted"):
            result = read_json(job.run_dir / "result.json")
            how = f"{result['status']}: {result.get('error')}" if result else "error: its end could not be written down"
            ends.append(f"job {job.entry.name}: {how}")
        if job.state == "failed":
            ends.append(failed_tail(job.entry))
    return "\n".join([aligned(rows, COLUMNS, LEFT), *filter(None, ends)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how the jobs are; return 1 if one has failed, 2 for a wrong path."""
    parser = argparse.ArgumentParser(prog="python -m longstraw.status", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", type=Path, help="the folder a command printed, or one job's folder in it")
    parser.add_argument("--job", metavar="JOB", help="show the end of this job's log; JOB as in the table")
    parser.add_argument("--rank", type=int, default=0, help="of this rank (with --job)")
    parser.add_argument("--lines", type=int, default=40, help="so many lines of it")
    parser.add_argument("--again", action="store_true", help="start what did not end well again, from checkpoints")
    given = parser.parse_args(arguments)
    try:
        jobs = find_jobs(given.path)
    except OSError as error:
        print(f"longstraw: {error}", file=sys.stderr)
        return 2
    if given.job is not None:
        return _show_log(jobs, given.job, given.rank, given.lines)
    trouble = look(jobs)
    print(report(jobs), flush=True)
    if trouble:
        print(f"longstraw: SLURM does not answer: {trouble}", file=sys.stderr)
    ended = [job for job in jobs if job.state in ("failed", "preempted")]
    if not given.again:
        return int(bool(ended))
    if (given.path / SPEC).exists() and jobs[
        0
    ].may_have_ended:  # a user who names the folder of such a job decides for it
        ended = jobs
    return _start_again(ended) if ended else _nothing_to_start(jobs)


def _start_again(jobs: Sequence[Status]) -> int:
    """Launch jobs again, from their checkpoints; return the exit status."""
    try:
        return launch(resume_jobs([job.run_dir for job in jobs]), jobs[0].entry.folder, alone=False)
    except (ConfigError, OSError) as error:
        print(f"longstraw: {error}", file=sys.stderr)
        return 2


def _nothing_to_start(jobs: Sequence[Status]) -> int:
    """Say why ``--again`` starts nothing; return 1 if a job is neither done nor seen to run."""
    print("longstraw: nothing is started again:", file=sys.stderr)
    for job in jobs:
        why = job.note
        if job.state == "running" and not job.slurm:
            why = _named(read_json(job.run_dir / "process.json"))
        elif job.may_have_ended:
            why = f"{why}; if it has ended: python -m longstraw.status {shlex.quote(str(job.run_dir))} --again"
        print(f"longstraw: job {job.entry.name} is {job.state}{why and f' ({why})'}", file=sys.stderr)
    return int(any(job.state not in ("done", "running") for job in jobs))


def _show_log(jobs: Sequence[Status], name: str, rank: int, lines: int) -> int:
    """Print the end of a rank's log; return the exit status."""
    entry = next((job.entry for job in jobs if job.entry.name == name), None)
    if entry is None:
        print(f"longstraw: no job {name}; there are {', '.join(job.entry.name for job in jobs)}", file=sys.stderr)
        return 2
    path = log_path(entry, rank)
    if path is None or not path.exists():
        print(f"longstraw: rank {rank} of job {name} has no log{f' at {path}' if path else ''}", file=sys.stderr)
        return 2
    print(path, *tail(path, lines), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
