"""Run prepared jobs in this process, as local processes or through SLURM, and show them until all are over.

``prepare.py`` checks them first: a command launches all of its jobs or, if one is wrong, none.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longstraw.config import ConfigError, from_dict
from longstraw.errors import RankLostError, describe, is_users
from longstraw.launch.display import JobLine, Screen, show_job
from longstraw.launch.executors import check_path, start_local, submit_slurm
from longstraw.launch.logs import failed_tail, tail
from longstraw.launch.manifest import find_entry, write_manifest
from longstraw.launch.placement import resolve
from longstraw.launch.result import record_failure
from longstraw.launch.slurm import Submitted
from longstraw.launch.spec import SPEC, Job
from longstraw.launch.worker import execute, prediction_may_fail
from longstraw.runtime.failure_files import first_failure
from longstraw.runtime.machine_memory import memory_limits
from longstraw.runtime.process_info import is_running, process_identity, process_info
from longstraw.tracking.job_table import table
from longstraw.tracking.run_folder import has_result, last_row, read_json, write_json
from longstraw.tracking.schema import RecordError, latest_attempt, records_path

POLL_SECONDS = 0.5
PRINTED_FAILURES = 3  # failed jobs whose last log lines are printed
STOP_SECONDS = 15  # time for a job to stop after it was asked to
INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended
HUNG_RANK_SECONDS = 10  # time for the ranks of a failed job to stop


def launch(jobs: Sequence[Job], folder: Path, *, alone: bool) -> int:
    """Run the jobs and return the exit status: 0 if every one succeeded. ``alone``: the one job of a command.

    That one runs in this process unless several ranks have to be started. Prints where the jobs run, shows their
    progress, and at the end prints their table and the path of their records.
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
    ids = {run_dir: handle.job_id for run_dir, handle in handles.items()}
    write_manifest(jobs, folder, ids, None if detach else process_identity())
    if detach:
        if not starting:
            print(table([job.run_dir for job in jobs]))
            return 1
        if here:
            write_manifest(here, folder, {}, _start_detached(here, folder))
        print("longstraw: started; this command does not wait (launch.detach=true)")
        return int(len(starting) < len(jobs))
    alone_here = in_process(here, alone=alone)
    if process_info().world_size > 1:
        from longstraw.runtime.rendezvous import offer_job

        offer_job(starting[0].run_dir if starting else None)
    code = run_in_process(here[0]) if alone_here else run_queue(starting, handles)
    code = code or int(len(starting) < len(jobs))
    if not alone_here and code != INTERRUPTED:
        _print_failed(jobs, handles)
    print(table([job.run_dir for job in jobs], errors=not alone_here))
    where = _shown(folder / "*" if len(jobs) > 1 else jobs[0].run_dir)  # hydra.run.dir names the job's own folder
    print(f"records: {where}/records.jsonl", flush=True)
    return code


def in_process(here: Sequence[Job], *, alone: bool) -> bool:
    """Return whether a command's only job runs in this process, because all its ranks are already started."""
    return alone and bool(here) and here[0].config.processes.world_size == process_info().world_size


def record_too_large(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that may start; for a job too large for its devices write a record that says what would fit.

    Nothing is allocated for such a job and SLURM is not asked. A job of one process on this machine looks at the
    machine's memory itself; for one of several it is done here, as they would wait for the one that does.
    """
    starting = []
    for job in jobs:
        reason, hardware = None, job.config.hardware
        if job.placement.mode == "run" and hardware.memory_gb is not None:
            from longstraw.memory.fit import too_large  # here: it needs torch, which takes seconds to load

            reason = too_large(job.config)
        elif (job.placement.mode, job.placement.executor) == ("run", "local") and hardware.world_size > 1:
            from longstraw.memory.fit import machine_refuses

            with prediction_may_fail():
                reason = machine_refuses(job.config, memory_limits(), hardware.world_size)
        if reason is None:
            starting.append(job)
        else:
            attempt = read_json(job.run_dir / "spec.json").get("first_attempt", 0)
            record_failure(job.run_dir, "too_large", reason, attempt)
    return starting


def _print_failed(jobs: Sequence[Job], handles: dict[Path, Any]) -> None:
    """Print the last lines of the jobs that did not end well, of the first few."""
    lost = [job for job in jobs if failed(job) and has_result(job.run_dir)]  # logs of preempted jobs do not say why
    for job in lost[:PRINTED_FAILURES]:
        end = failed_tail(find_entry(job.run_dir))
        print(end, end="\n" if end else "")


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def failed(job: Job) -> bool:
    """Return whether a finished job failed; the last row is not enough: on a full disk it is of an earlier step."""
    row, result = last_row(job.run_dir), read_json(job.run_dir / "result.json")
    return row is None or row.get("status") != "ok" or result.get("status") != "ok"


def run_in_process(job: Job) -> int:
    """Run one job in this process; print a user's mistake as one line, anything else as a traceback."""
    try:
        with _termination_as_interrupt(), show_job(JobLine(job.run_dir, "", job.config.steps)):
            stopped = execute(job.run_dir)
    except KeyboardInterrupt as stop:
        number = signal.Signals(stop.args[0] if stop.args else signal.SIGINT)
        with _ignoring_interrupts():
            record_failure(job.run_dir, "error", f"interrupted ({number.name})")
        print(f"longstraw: interrupted ({number.name}); {_how_to_go_on(job)}", file=sys.stderr)
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
    if stopped is not None:
        print(f"longstraw: {_how_to_go_on(job)}", file=sys.stderr)
        return 128 + stopped
    return int(failed(job))


def _how_to_go_on(job: Job) -> str:
    return f"go on with it: python -m longstraw.status {shlex.quote(_shown(job.run_dir))} --again"


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Ignore further Ctrl-C while the last lines about a job are written."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_torchrun_worker() -> int:
    """Run one of torchrun's ranks of the job that its rank 0 composed; return the exit status."""
    from longstraw.runtime.rendezvous import offered_job

    try:
        with _termination_as_interrupt():
            run_dir = offered_job()
            if run_dir is None:
                time.sleep(STOP_SECONDS)  # torchrun ends this process when rank 0, which prints the reason, ends
                return 2
            execute(run_dir)
    except KeyboardInterrupt as stop:
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except Exception as error:
        print(f"longstraw: rank {process_info().rank}: {describe(error)}", file=sys.stderr)
        return 1
    return 0


def run_queue(jobs: Sequence[Job], handles: dict[Path, Any]) -> int:
    """Start local jobs as others end, up to ``launch.max_parallel``; wait for all; return the exit status.

    ``handles`` are those already submitted, by run folder. A job that was killed gets its record here. An interrupt
    ends what was started here; SLURM's jobs are cancelled too.
    """
    names = labels(jobs)
    lines = {job.run_dir: JobLine(job.run_dir, name, job.config.steps) for job, name in zip(jobs, names, strict=True)}
    waiting = [job for job in jobs if job.run_dir not in handles]
    limit = (jobs[0].config.launch.max_parallel if jobs else None) or 1
    begun: dict[Path, float] = {}
    ended: set[Path] = set()  # jobs whose last rank had to be ended
    screen = Screen(list(lines.values()))
    with _termination_as_interrupt():
        try:
            while waiting or any(line.state in ("queued", "running") for line in lines.values()):
                running = [run_dir for run_dir in begun if lines[run_dir].state in ("queued", "running")]
                for job in waiting[: max(limit - len(running), 0)]:
                    handles[job.run_dir], begun[job.run_dir] = start_local(job), time.monotonic()
                    waiting.remove(job)
                changed = [job for job in jobs if _poll(job, lines[job.run_dir], handles, begun, ended)]
                screen.update([lines[job.run_dir] for job in changed])
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):  # a second one ends the wait for the jobs
                _stop(jobs, lines, handles)
            return INTERRUPTED
        finally:
            screen.close()
    return int(any(line.state == "failed" for line in lines.values()))


def _poll(job: Job, line: JobLine, handles: dict[Path, Any], begun: dict[Path, float], ended: set[Path]) -> bool:
    """Bring a job's line up to date; return whether its state is new."""
    handle = handles.get(job.run_dir)
    if handle is None or line.state in ("done", "failed"):
        return False
    if not handle.done():
        if job.run_dir not in ended and has_hung_rank(job):
            ended.add(job.run_dir)
            handle.cancel(check=False)
        before, line.note = line.note, handle.note() if isinstance(handle, Submitted) else ""
        new = line.become("queued" if handle.state in ("PENDING", "UNKNOWN") else "running")
        return new or bool(line.note and line.note != before)
    line.note = ""
    if not has_result(job.run_dir):
        ran = time.monotonic() - begun.get(job.run_dir, time.monotonic())
        restarts = handle.known.restarts if isinstance(handle, Submitted) else 0
        attempt = read_json(job.run_dir / "spec.json").get("first_attempt", 0) + restarts
        lost = first_failure(job.run_dir, attempt)
        if lost is None:
            record_failure(job.run_dir, "error", _death_reason(job, handle, ran), attempt)
        else:
            record_failure(job.run_dir, lost.status, describe(lost), attempt, lost.rank)
    return line.become("failed" if failed(job) else "done")


def has_hung_rank(job: Job) -> bool:
    """Return whether a local job has failed and one of its ranks does not end, for example because it is stopped."""
    if job.placement.executor != "local" or job.config.processes.world_size == 1 or not has_result(job.run_dir):
        return False
    path = job.run_dir / "result.json"
    return read_json(path)["status"] != "ok" and time.time() - path.stat().st_mtime > HUNG_RANK_SECONDS


def _death_reason(job: Job, handle: Any, ran: float) -> str:
    minutes, log = job.config.hardware.time_min, _shown(Path(handle.paths.stdout))
    if ran >= minutes * 60 or handle.state == "TIMEOUT":
        return f"the time limit of {minutes} min was reached (hardware.time_min); log: {log}"
    if handle.state == "COMPLETED" and job.placement.executor == "slurm":  # its daemon was killed, say
        return f"SLURM lost sight of its processes; any that is left ends when the job is started again; log: {log}"
    raised = [line for line in tail(Path(handle.paths.stdout), 1) if re.match(r"\w*Error\b", line)]
    if raised and job.placement.executor == "local":  # on a full disk, say
        return f"it failed and could not record it ({raised[0]}); log: {log}"
    if handle.state == "FAILED" and not (job.run_dir / "process.json").exists():  # Python could not import us, say
        words = [line for line in tail(Path(handle.paths.stdout), 20) if "Error" in line]
        return f"it failed before it began{f' ({words[-1].strip()})' if words else ''}; log: {log}"
    state = "" if job.placement.executor == "local" else f" (SLURM: {handle.state})"
    return f"the process was killed from outside, or by the kernel because memory ran out{state}; log: {log}"


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Make SIGTERM end the jobs as Ctrl-C does, and let child processes receive Ctrl-C even if this one ignores it."""

    def interrupt(number: int, _: Any) -> None:
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(jobs: Sequence[Job], lines: dict[Path, JobLine], handles: dict[Path, Any]) -> None:
    """Cancel every running job, wait for its end, and write the last record where the job could not."""
    open_jobs = [job for job in jobs if job.run_dir in handles and lines[job.run_dir].state in ("queued", "running")]
    for job in open_jobs:
        handles[job.run_dir].cancel(check=False)
    deadline = time.monotonic() + STOP_SECONDS
    try:
        while time.monotonic() < deadline and not all(_is_over(job, handles[job.run_dir]) for job in open_jobs):
            time.sleep(0.1)
    finally:
        with _ignoring_interrupts():
            for job in open_jobs:
                _kill(job)
                if not has_result(job.run_dir):  # it may just have ended by itself
                    record_failure(job.run_dir, "error", "interrupted: the command that started it was ended")


def _is_over(job: Job, handle: Any) -> bool:
    """Return whether a job has ended; Ctrl-C may have killed submitit's controller before the job itself."""
    process = read_json(job.run_dir / "process.json")
    return handle.done() and not (process and job.placement.executor == "local" and is_running(process))


def _kill(job: Job) -> None:
    """Kill a job that did not stop by itself in time; its other ranks end when rank 0 is gone."""
    process = read_json(job.run_dir / "process.json")
    if process and job.placement.executor == "local" and is_running(process):
        with contextlib.suppress(OSError):
            os.kill(process["pid"], signal.SIGKILL)


def labels(jobs: Sequence[Job]) -> list[str]:
    """Return a label for each job of a sweep: its folder and the overrides not shared by all."""
    shared = set(jobs[0].overrides).intersection(*(job.overrides for job in jobs)) if jobs else set()
    return [
        " ".join([f"job {job.run_dir.name}", *(text for text in job.overrides if text not in shared)]) for job in jobs
    ]


def frozen_job(run_dir: Path) -> Job:
    """Return the job of a folder's ``spec.json``; raise ``ConfigError`` where it cannot run here."""
    spec = read_json(run_dir / SPEC)
    if not spec:
        raise ConfigError(f"{run_dir / SPEC} cannot be read, so the job cannot be started")
    config = from_dict(spec["config"])
    return Job(spec["num"], spec["overrides"], run_dir, config, resolve(config))


def resume_jobs(run_dirs: Sequence[Path]) -> list[Job]:
    """Return earlier jobs, ready to be launched again from their checkpoints.

    The next attempt gets a higher number; a process of an earlier attempt that is still alive writes nothing more.
    Raises ``ConfigError`` where one cannot run here.
    """
    jobs = [frozen_job(run_dir) for run_dir in run_dirs]
    for job in jobs:
        check_path(job.run_dir, job.placement.executor)
    for job in jobs:
        attempt = latest_attempt(job.run_dir)
        if attempt is not None:
            try:
                records_path(job.run_dir, attempt + 1).touch(exist_ok=False)
            except FileExistsError:
                raise ConfigError(f"{job.run_dir} was started again by another command a moment ago") from None
        write_manifest([job], find_entry(job.run_dir).folder, {}, process_identity())
        spec = {**read_json(job.run_dir / SPEC), "first_attempt": 0 if attempt is None else attempt + 1}
        write_json(job.run_dir / SPEC, spec)
        for name in ("result.json", "process.json", "progress.json"):
            (job.run_dir / name).unlink(missing_ok=True)
    return jobs


def _start_detached(jobs: Sequence[Job], folder: Path) -> dict[str, Any]:
    """Start a process that runs the local jobs and outlives this one; return its identity."""
    with (folder / "launch.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "longstraw.launch.jobs", *(str(job.run_dir) for job in jobs)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process_identity(process.pid)


def main(run_dirs: Sequence[Path]) -> int:
    """Run local jobs that a command with ``launch.detach=true`` has prepared."""
    jobs = [frozen_job(run_dir) for run_dir in run_dirs]
    code = run_queue(jobs, {})
    print(table([job.run_dir for job in jobs]), flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main([Path(argument) for argument in sys.argv[1:]]))
