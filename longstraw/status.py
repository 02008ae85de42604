"""``python -m longstraw.status PATH``: how the jobs of a sweep are, on SLURM or on this machine.

PATH is the folder a command printed, or one job's folder in it. What a killed job could not write down is written here
if no launcher is left to do it.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.config import ConfigError
from longstraw.launch.jobs import launch, resume_jobs
from longstraw.launch.logs import failed_tail, log_path, tail
from longstraw.launch.result import record_failure
from longstraw.launch.slurm import LAG_SECONDS, WAITING, Known, Queue, advice
from longstraw.tracking.run_folder import aligned, has_result, read_json, read_steps
from longstraw.units import format_bytes

COLUMNS = ("job", "state", "preempted", "step", "positions", "peak bytes", "doing", "log")
LEFT = ("job", "state", "doing", "log")
FRESH_SECONDS = 3600  # a job on another machine that has told of no progress for so long may be dead


@dataclass
class Status:
    """One job: ``state`` is pending, running, done, failed, preempted or unknown."""

    run_dir: Path
    num: int
    slurm: bool
    job_id: str | None
    state: str = "unknown"
    preempted: int = 0
    note: str = ""

    def row(self) -> dict[str, str]:
        """Return the job's cells in the table."""
        config = read_json(self.run_dir / "spec.json").get("config", {})
        rows = read_steps(self.run_dir)
        done = [row for row in rows if row.get("status") == "ok"]
        peaks = [row["peak_allocated_bytes"] for row in rows if row.get("peak_allocated_bytes") is not None]
        last = done[-1] if done else {}
        sizes = [last[key] for key in ("prompt_positions", "response_positions") if last.get(key) is not None]
        path = log_path(self.run_dir, self.job_id, slurm=self.slurm)
        return {
            "job": str(self.num),
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
        return f"step {now.get('step', 0) + 1} {now['verb']}{counts}"


def find_jobs(path: Path) -> list[Status]:
    """Return the jobs of a command's folder, or the one of a job's folder; raise ``FileNotFoundError`` for others."""
    only = path if (path / "spec.json").exists() else None
    folder = path.parent if only is not None else path
    entries = read_json(folder / "sweep.json").get("jobs", [])
    if not entries:
        known = sorted(path.glob("**/sweep.json"), key=lambda found: found.stat().st_mtime)
        hint = f"; the newest below it is {known[-1].parent}" if known else ""
        raise FileNotFoundError(f"{path} is no folder of jobs: it has no sweep.json{hint}")
    jobs = [
        Status(_moved(entry, folder), entry["num"], entry["executor"] == "slurm", entry.get("job_id"))
        for entry in entries
    ]
    return [job for job in jobs if only is None or job.run_dir.resolve() == only.resolve()]


def _moved(entry: dict[str, Any], folder: Path) -> Path:
    """Return a job's folder, also where the whole was copied from elsewhere."""
    run_dir = Path(entry["run_dir"])
    return run_dir if run_dir.exists() else folder / run_dir.name


def look(jobs: Sequence[Status]) -> str:
    """Bring the jobs up to date; return why SLURM does not answer, if it does not."""
    queue = Queue()
    known = {job.num: queue.look(str(job.job_id)) for job in jobs if job.slurm}
    deadline = time.monotonic() + LAG_SECONDS
    for job in jobs:
        if not job.slurm:
            _look_here(job)
            continue
        over = known[job.num].over or (known[job.num].state == "UNKNOWN" and not queue.trouble)
        while over and not has_result(job.run_dir) and time.monotonic() < deadline:
            time.sleep(0.5)  # a shared file system shows late what a node wrote
        _look_slurm(job, known[job.num], over, queue.trouble)
    return queue.trouble


def _look_slurm(job: Status, known: Known, over: bool, trouble: str) -> None:
    job.preempted = max(known.restarts, _preempted(job.run_dir))
    if over and not has_result(job.run_dir):
        state = known.state if known.over else "it knows the job no more"
        attempt = read_json(job.run_dir / "spec.json").get("first_attempt", 0) + known.restarts
        record_failure(job.run_dir, "error", f"the job ended without a word (SLURM: {state})", attempt)
    if known.state in WAITING:  # also one whose other ranks ended when a node was lost: SLURM starts it again
        job.state, job.note = "pending", advice(known.reason)
    elif over or has_result(job.run_dir):
        job.state = _ended(job.run_dir)
    elif trouble:
        job.note = "SLURM does not answer"
    else:
        job.state = "running"


def _look_here(job: Status) -> None:
    job.preempted = _preempted(job.run_dir)
    process = read_json(job.run_dir / "process.json")
    if read_json(job.run_dir / "result.json"):
        job.state = _ended(job.run_dir)
    elif not process:
        job.state = "pending"
    elif process["host"] != socket.gethostname():
        told = job.run_dir / "progress.json"
        fresh = told.exists() and time.time() - told.stat().st_mtime < FRESH_SECONDS
        job.state, job.note = ("running" if fresh else "unknown"), f"on {process['host']}"
    elif _alive(process["pid"]):
        job.state = "running"
    else:
        record_failure(job.run_dir, "error", "the process was killed from outside, or by the kernel for want of memory")
        job.state = _ended(job.run_dir)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
            ends.append(f"job {job.num}: {result.get('status')}: {result.get('error')}")
        if job.state == "failed":
            ends.append(failed_tail(job.run_dir, job.job_id, slurm=job.slurm))
    return "\n".join([aligned(rows, COLUMNS, LEFT), *filter(None, ends)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how the jobs are; return 1 if one has failed, 2 for a wrong path."""
    parser = argparse.ArgumentParser(prog="python -m longstraw.status", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", type=Path, help="the folder a command printed, or one job's folder in it")
    parser.add_argument("--job", type=int, help="show the end of this job's log")
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
    if given.again and ended:
        return _start_again([job.run_dir for job in ended])
    return int(bool(ended))


def _start_again(run_dirs: Sequence[Path]) -> int:
    """Launch jobs again, from their checkpoints; return the exit status."""
    try:
        return launch(resume_jobs(run_dirs), run_dirs[0].parent, alone=False)
    except ConfigError as error:
        print(f"longstraw: {error}", file=sys.stderr)
        return 2


def _show_log(jobs: Sequence[Status], num: int, rank: int, lines: int) -> int:
    """Print the end of a rank's log; return the exit status."""
    job = next((job for job in jobs if job.num == num), None)
    if job is None:
        print(f"longstraw: no job {num}; there are {', '.join(str(job.num) for job in jobs)}", file=sys.stderr)
        return 2
    path = log_path(job.run_dir, job.job_id, rank, slurm=job.slurm)
    if path is None or not path.exists():
        print(f"longstraw: rank {rank} of job {num} has no log{f' at {path}' if path else ''}", file=sys.stderr)
        return 2
    print(path, *tail(path, lines), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
