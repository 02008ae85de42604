"""Jobs: checked all together, frozen, then run in this process, as local processes or through SLURM.

A command either launches all of its jobs or, where one is wrong, none.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longstraw.config import ConfigError, from_dict, to_dict
from longstraw.errors import RankLostError, describe, is_users
from longstraw.launch.display import JobLine, Screen, show_job
from longstraw.launch.executors import check_slurm, start_local, submit_slurm
from longstraw.launch.inputs import check_inputs, without_effect
from longstraw.launch.logs import failed_tail, tail
from longstraw.launch.placement import resolve
from longstraw.launch.result import record_failure
from longstraw.launch.slurm import Submitted
from longstraw.launch.spec import Draft, Job
from longstraw.launch.worker import execute
from longstraw.runtime.failure_files import first_failure
from longstraw.runtime.process_info import process_info
from longstraw.tracking.run_folder import has_result, last_row, read_json, table, write_json
from longstraw.tracking.schema import RecordError, latest_attempt, records_path

POLL_SECONDS = 0.5
PRINTED_FAILURES = 3  # failed jobs of which the last lines are printed
STOP_SECONDS = 15  # a job that was asked to end gets this long
HUNG_RANK_SECONDS = 10  # so do the ranks of one that has failed


def prepare(drafts: Sequence[Draft], *, command: str, sweep: str | None) -> list[Job]:
    """Return the jobs, each frozen to its ``spec.json``; raise ``ConfigError`` naming every job that is wrong."""
    jobs: list[Job] = []
    wrong = [(given.num, given.error) for given in drafts if given.error]
    asked: dict[str, str] = {}  # what sbatch said of each set of resources
    for given in drafts:
        if given.config is None:
            continue
        try:
            placement = resolve(given.config)
            if placement.executor == "slurm":
                check_slurm(given.run_dir.parent, given.config, asked)
            given.config.mode = placement.mode
            check_inputs(given.config)
        except (ConfigError, NameError, ValueError, RuntimeError, OSError) as error:
            wrong.append((given.num, str(error)))
            continue
        jobs.append(Job(given.num, given.overrides, given.run_dir, given.config, placement))
    if wrong:
        raise ConfigError(_error_lines(wrong, len(drafts)))
    for note in dict.fromkeys(filter(None, (without_effect(job.config) for job in jobs))):
        print(f"longstraw: {note}", file=sys.stderr)
    stamp = f"{jobs[0].run_dir.parent.name}-{secrets.token_hex(2)}"
    for job in jobs:
        job.run_dir.mkdir(parents=True, exist_ok=True)
        spec = {"run_id": f"{stamp}-{job.num}", "sweep": sweep, "num": job.num, "overrides": job.overrides}
        write_json(job.run_dir / "spec.json", {**spec, "command": command, "config": to_dict(job.config)})
    return jobs


def _error_lines(wrong: Sequence[tuple[int, str]], count: int) -> str:
    """Return one line for each reason, with the jobs it holds for."""
    reasons: dict[str, list[str]] = {}
    for num, reason in sorted(wrong):
        reasons.setdefault(reason, []).append(str(num))
    if count == 1:
        return next(iter(reasons))
    lines = [f"job{'s' * (len(nums) > 1)} {', '.join(nums)}: {reason}" for reason, nums in reasons.items()]
    return "\n".join([f"{len({num for num, _ in wrong})} of {count} jobs are wrong, none was started", *lines])


def launch(jobs: Sequence[Job], folder: Path, *, alone: bool) -> int:
    """Run the jobs and return the exit status: 0 if every one succeeded. ``alone``: the one job of a command.

    That one runs in this process, unless it has several ranks to be started. Prints where the jobs run, shows them, and
    ends with their table and the path of their records.
    """
    for placement in dict.fromkeys(job.placement for job in jobs):
        count = sum(job.placement == placement for job in jobs)
        jobs_text = "" if alone else f"{count} job{'s' * (count > 1)}: "
        print(
            f"longstraw: mode={placement.mode}: {jobs_text}{placement.why}; records go to {_shown(folder)}", flush=True
        )
    starting = record_too_large(jobs)
    here = [job for job in starting if job.placement.executor == "local"]
    detach = jobs[0].config.launch.detach
    handles = submit_slurm([job for job in starting if job.placement.executor == "slurm"], folder)
    write_manifest(jobs, folder, handles)
    if detach:
        if not starting:
            print(table([job.run_dir for job in jobs]))
            return 1
        if here:
            _start_detached(folder)
        print("longstraw: started; this command does not wait (launch.detach=true)")
        return int(len(starting) < len(jobs))
    in_process = alone and bool(here) and here[0].config.processes.world_size == process_info().world_size
    if process_info().world_size > 1:
        from longstraw.runtime.rendezvous import offer_job

        offer_job(starting[0].run_dir if starting else None)
    code = run_in_process(here[0]) if in_process else run_queue(starting, handles)
    code = code or int(len(starting) < len(jobs))
    if not in_process:
        _print_failed(jobs, handles)
    print(table([job.run_dir for job in jobs], errors=not in_process))
    where = _shown(folder / "*" if len(jobs) > 1 else jobs[0].run_dir)  # hydra.run.dir names the job's own folder
    print(f"records: {where}/records.jsonl", flush=True)
    return code


def record_too_large(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that may start; one that cannot fit its devices gets its record instead, which says what would.

    Nothing has been allocated or asked of SLURM for it.
    """
    starting = []
    for job in jobs:
        reason = None
        if job.placement.mode == "run" and job.config.hardware.memory_gb is not None:
            from longstraw.memory.fit import too_large  # here: it needs torch, which takes seconds to load

            reason = too_large(job.config)
        if reason is None:
            starting.append(job)
        else:
            attempt = read_json(job.run_dir / "spec.json").get("first_attempt", 0)
            record_failure(job.run_dir, "too_large", reason, attempt)
    return starting


def _print_failed(jobs: Sequence[Job], handles: dict[int, Any]) -> None:
    """Print the last lines of the jobs that did not end well, of the first few."""
    lost = [job for job in jobs if failed(job) and has_result(job.run_dir)]  # preempted ones tell nothing there
    for job in lost[:PRINTED_FAILURES]:
        handle = handles.get(job.num)
        end = failed_tail(job.run_dir, handle.job_id if handle else None, slurm=job.placement.executor == "slurm")
        print(end, end="\n" if end else "")


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def failed(job: Job) -> bool:
    """Return whether a job that is over did not end well; its last row may be of a step before the disk was full."""
    row, result = last_row(job.run_dir), read_json(job.run_dir / "result.json")
    return row is None or row.get("status") != "ok" or result.get("status") != "ok"


def run_in_process(job: Job) -> int:
    """Run one job in this process; a mistake of the user's is one line, anything else a traceback."""
    try:
        with _termination_as_interrupt(), show_job(JobLine(job.run_dir, "", job.config.steps)):
            execute(job.run_dir)
    except KeyboardInterrupt as stop:
        number = signal.Signals(stop.args[0] if stop.args else signal.SIGINT)
        record_failure(job.run_dir, "error", f"interrupted ({number.name})")
        return 128 + number
    except Exception as error:
        if not is_users(error) and not isinstance(error, RankLostError | RecordError):
            traceback.print_exc()
        trace = job.run_dir / "error.txt"
        where = f" (traceback: {_shown(trace)})" if trace.exists() and trace.stat().st_size else ""  # a full disk
        print(f"longstraw: {describe(error)}{where}", file=sys.stderr)
        return 1
    row = last_row(job.run_dir) or {"error": "no record was written"}
    if row.get("error"):
        print(f"longstraw: {row['error']}", file=sys.stderr)
    return int(failed(job))


def run_torchrun_worker() -> int:
    """Run one of torchrun's ranks of the job that its rank 0 composed; return the exit status."""
    from longstraw.runtime.rendezvous import offered_job

    try:
        with _termination_as_interrupt():
            run_dir = offered_job()
            if run_dir is None:
                time.sleep(STOP_SECONDS)  # torchrun ends this process as soon as rank 0, which says why, has ended
                return 2
            execute(run_dir)
    except KeyboardInterrupt as stop:
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except Exception as error:
        print(f"longstraw: rank {process_info().rank}: {describe(error)}", file=sys.stderr)
        return 1
    return 0


def run_queue(jobs: Sequence[Job], handles: dict[int, Any]) -> int:
    """Start local jobs as others end, up to ``launch.max_parallel``; wait for all; return the exit status.

    ``handles`` are those already submitted. A job that died without a word gets its line here. An interrupt ends what
    was started here; SLURM's jobs are cancelled too.
    """
    lines = {
        job.num: JobLine(job.run_dir, label, job.config.steps) for job, label in zip(jobs, labels(jobs), strict=True)
    }
    waiting = [job for job in jobs if job.num not in handles]
    limit = (jobs[0].config.launch.max_parallel if jobs else None) or 1
    begun: dict[int, float] = {}
    ended: set[int] = set()  # jobs whose last rank had to be ended
    screen = Screen(list(lines.values()))
    with _termination_as_interrupt():
        try:
            while waiting or any(lines[job.num].state in ("queued", "running") for job in jobs):
                running = [job for job in jobs if job.num in begun and lines[job.num].state in ("queued", "running")]
                for job in waiting[: max(limit - len(running), 0)]:
                    handles[job.num], begun[job.num] = start_local(job), time.monotonic()
                    waiting.remove(job)
                screen.update([lines[job.num] for job in jobs if _poll(job, lines[job.num], handles, begun, ended)])
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            _stop(jobs, lines, handles)
            return 130
        finally:
            screen.close()
    return int(any(line.state == "failed" for line in lines.values()))


def _poll(job: Job, line: JobLine, handles: dict[int, Any], begun: dict[int, float], ended: set[int]) -> bool:
    """Bring a job's line up to date; return whether its state is new."""
    handle = handles.get(job.num)
    if handle is None or line.state in ("done", "failed"):
        return False
    if not handle.done():
        if job.num not in ended and has_hung_rank(job):
            ended.add(job.num)
            handle.cancel(check=False)
        before, line.note = line.note, handle.note() if isinstance(handle, Submitted) else ""
        new = line.become("queued" if handle.state in ("PENDING", "UNKNOWN") else "running")
        return new or bool(line.note and line.note != before)
    line.note = ""
    if not has_result(job.run_dir):
        ran = time.monotonic() - begun.get(job.num, time.monotonic())
        resume_jobs = handle.known.restarts if isinstance(handle, Submitted) else 0
        attempt = read_json(job.run_dir / "spec.json").get("first_attempt", 0) + resume_jobs
        lost = first_failure(job.run_dir, attempt)
        if lost is None:
            record_failure(job.run_dir, "error", _death_reason(job, handle, ran), attempt)
        else:
            record_failure(job.run_dir, lost.status, describe(lost), attempt, lost.rank)
    return line.become("failed" if failed(job) else "done")


def has_hung_rank(job: Job) -> bool:
    """Return whether a local job has failed and a rank of it does not end: one that was stopped, say."""
    if job.placement.executor != "local" or job.config.processes.world_size == 1 or not has_result(job.run_dir):
        return False
    path = job.run_dir / "result.json"
    return read_json(path)["status"] != "ok" and time.time() - path.stat().st_mtime > HUNG_RANK_SECONDS


def _death_reason(job: Job, handle: Any, ran: float) -> str:
    minutes, log = job.config.hardware.time_min, _shown(Path(handle.paths.stdout))
    if ran >= minutes * 60 or handle.state == "TIMEOUT":
        return f"the time limit of {minutes} min was reached (hardware.time_min); log: {log}"
    if handle.state == "COMPLETED" and job.placement.executor == "slurm":  # its daemon was killed, say
        return f"SLURM lost sight of its processes; one that is left ends once the job is started again; log: {log}"
    if handle.state == "FAILED" and not (job.run_dir / "process.json").exists():  # Python could not import us, say
        words = [line for line in tail(Path(handle.paths.stdout), 20) if "Error" in line]
        return f"it failed before it began{f' ({words[-1].strip()})' if words else ''}; log: {log}"
    state = "" if job.placement.executor == "local" else f" (SLURM: {handle.state})"
    return f"the process was killed from outside, or by the kernel for want of memory{state}; log: {log}"


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let a termination signal end the jobs as Ctrl-C does, and let children see Ctrl-C whoever started us."""

    def interrupt(number: int, _: Any) -> None:
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(jobs: Sequence[Job], lines: dict[int, JobLine], handles: dict[int, Any]) -> None:
    """Cancel every job that is not over, wait for its end, and write the line it could not."""
    open_jobs = [job for job in jobs if job.num in handles and lines[job.num].state in ("queued", "running")]
    for job in open_jobs:
        handles[job.num].cancel(check=False)
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline and not all(handles[job.num].done() for job in open_jobs):
        time.sleep(0.1)
    for job in open_jobs:
        if not has_result(job.run_dir):  # it may just have ended by itself
            record_failure(job.run_dir, "error", "interrupted: the command that started it was ended")


def labels(jobs: Sequence[Job]) -> list[str]:
    """Return what tells each job of a sweep from the others: its number and the overrides not shared by all."""
    shared = set(jobs[0].overrides).intersection(*(job.overrides for job in jobs)) if jobs else set()
    return [" ".join([f"job {job.num}", *(text for text in job.overrides if text not in shared)]) for job in jobs]


def write_manifest(jobs: Sequence[Job], folder: Path, handles: dict[int, Any]) -> None:
    """Write ``sweep.json``: which jobs there are and where each was sent; others that are in it stay."""
    ids = {num: handle.job_id for num, handle in handles.items()}
    entries = {entry["num"]: entry for entry in read_json(folder / "sweep.json").get("jobs", [])}
    for job in jobs:
        sent = {"executor": job.placement.executor, "job_id": ids.get(job.num)}
        entries[job.num] = {"num": job.num, "run_dir": str(job.run_dir.absolute()), **sent}
    write_json(folder / "sweep.json", {"jobs": [entries[num] for num in sorted(entries)]})


def resume_jobs(run_dirs: Sequence[Path]) -> list[Job]:
    """Return jobs that ran before as ones to be launched again: they go on from their checkpoints.

    Each attempt from now on is counted as a later one; one before that is still alive writes nothing more.
    Raises ``ConfigError`` where one cannot run here.
    """
    jobs = []
    for run_dir in run_dirs:
        spec = read_json(run_dir / "spec.json")
        config = from_dict(spec["config"])
        jobs.append(Job(spec["num"], spec["overrides"], run_dir, config, resolve(config)))
    for job in jobs:
        attempt = latest_attempt(job.run_dir)
        spec = {**read_json(job.run_dir / "spec.json"), "first_attempt": 0 if attempt is None else attempt + 1}
        write_json(job.run_dir / "spec.json", spec)
        if attempt is not None:
            records_path(job.run_dir, attempt + 1).touch()
        for name in ("result.json", "process.json", "progress.json"):
            (job.run_dir / name).unlink(missing_ok=True)
    return jobs


def _start_detached(folder: Path) -> None:
    """Start a process of its own that runs the local jobs of ``folder`` and outlives this one."""
    with (folder / "launch.log").open("ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "longstraw.launch.jobs", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def main(folder: Path) -> int:
    """Run the local jobs of a launched folder; what ``launch.detach=true`` leaves behind."""
    jobs = []
    for entry in read_json(folder / "sweep.json")["jobs"]:
        if entry["executor"] == "local" and not has_result(Path(entry["run_dir"])):
            spec = read_json(Path(entry["run_dir"]) / "spec.json")
            config = from_dict(spec["config"])
            jobs.append(Job(spec["num"], spec["overrides"], Path(entry["run_dir"]), config, resolve(config)))
    code = run_queue(jobs, {})
    print(table([job.run_dir for job in jobs]), flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
