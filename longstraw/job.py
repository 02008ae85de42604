"""What runs where the hardware is: one job, from its frozen ``spec.json`` to its records.

Submitted by reference, so nothing but a path is pickled and what was typed is what runs, also after a requeue.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longstraw.config import HardwareConfig, RunConfig, from_dict
from longstraw.failures import RankLostError, describe, status_of
from longstraw.parallel.started import check_world_size, started, threads
from longstraw.parallel.words import word_of, words_folder, write_word
from longstraw.provenance import startup_facts
from longstraw.record import append_row, latest_attempt
from longstraw.schema import RecordError, constant_keys
from longstraw.slurm import SlurmError, own_id, requeue
from longstraw.stop import Preempted, Stop, Superseded
from longstraw.table import last_row

LEAVE_SECONDS = 60  # that SLURM may take to end a job that went back into the queue


def execute(run_dir: str | Path) -> None:
    """Run the job that ``run_dir/spec.json`` describes and leave ``result.json``; raise what the job raised.

    Every rank of a job calls this. Whatever happens to the job, its records have a line that says so; rank 0 writes it,
    or, once that one is lost, another. Each rank that fails leaves its reason, and each has a log of its own.
    """
    folder = Path(run_dir)
    with _listening():
        stopped, config, ran = _run(folder)
    if stopped is not None and rank() == 0:
        _leave(config, stopped, ran)


def _listening() -> contextlib.AbstractContextManager[Any]:
    """Note a signal that comes before the loop listens, or after: submitit would ignore it, or end the job with it.

    Loading the loop and the ranks' meeting take longer than many a site waits. A job that a user started in a terminal
    ends at once instead.
    """
    return Stop().listening() if started().by in ("slurm", "local") else contextlib.nullcontext()


def _run(folder: Path) -> tuple[Preempted | None, RunConfig, float]:
    """Run a job; return why it stopped before its end, if it did, its configuration and the seconds it took."""
    spec = json.loads((folder / "spec.json").read_text())
    attempt = spec.get("first_attempt", 0) + int(os.environ.get("SLURM_RESTART_COUNT", 0))
    if rank() == 0:
        with contextlib.suppress(OSError):  # whatever is wrong with the folder is told below
            (folder / "result.json").unlink(missing_ok=True)  # an earlier attempt's
            write_json(folder / "process.json", {"attempt": attempt, "host": socket.gethostname(), "pid": os.getpid()})
    began = time.monotonic()
    try:
        config = from_dict(spec["config"])
        _prepare_process()
        run_job = _loop(config.mode)
        context = {key: spec[key] for key in ("run_id", "sweep", "command", "overrides")}
        with _connected(config.processes, folder, attempt) as ranks:
            stopped = run_job(config, folder, attempt=attempt, **context, **ranks)
    except Superseded:
        raise
    except Exception as error:
        if rank() == 0 or _inherits(folder, attempt, error):
            with contextlib.suppress(OSError):  # a full disk, for one: what it led to is what the user must read
                (folder / "error.txt").write_text(traceback.format_exc())
            leave_word(folder, status_of(error), describe(error), attempt, failed_rank(error))
        if started().world_size > 1:
            own = RankLostError(rank(), socket.gethostname(), f"failed: {describe(error)}", status_of(error))
            lost = error if isinstance(error, RankLostError) else own
            write_word(words_folder(folder, attempt), rank(), word_of(lost))  # unless it has left one
        raise
    if rank() == 0:
        row = last_row(folder) or {}
        _finish(folder, attempt, row.get("status") or "ok", row.get("error"))
    return stopped, config, time.monotonic() - began


def _loop(mode: str) -> Callable[..., Preempted | None]:
    """Return what takes a job's steps, or simulates them; imports torch."""
    if mode == "simulate":
        from longstraw.simulate import simulate_job

        return simulate_job
    if mode == "emulate":
        from longstraw.emulate import emulate_job

        return emulate_job
    from longstraw.train import run_job

    return run_job


def _leave(config: RunConfig, stopped: Preempted, ran: float) -> None:
    """Go back into SLURM's queue, unless this job would never get further; raise what stopped it where it may not."""
    job_id, limit = own_id(), 60 * config.hardware.time_min
    if job_id is None or not config.checkpoint.requeue:
        return
    if not stopped.progressed and stopped.signal == signal.SIGUSR2 and ran > limit / 2:
        print(
            f"longstraw: no step was done within {limit // 60} min, so the job is not started again; raise "
            "hardware.time_min",
            file=sys.stderr,
        )
        return
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it, and SLURM would wait before it kills
        if requeue(job_id):
            time.sleep(LEAVE_SECONDS)  # SLURM ends us: a job that ends by itself is not started again
    except SlurmError as error:
        print(f"longstraw: SLURM does not take the job back: {error}", file=sys.stderr)


def rank() -> int:
    """Return this process's rank as submitit, SLURM or torchrun tell it; 0 without any."""
    return started().rank


def failed_rank(error: BaseException) -> int:
    """Return the rank that an exception is to be blamed on."""
    return error.rank if isinstance(error, RankLostError) else rank()


def _prepare_process() -> None:
    """Set what torch reads when it is loaded."""
    # Threads that spin while they wait are three times slower as soon as anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if started().world_size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads(started())))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost rank is a page of C++ frames otherwise


@contextlib.contextmanager
def _connected(hardware: HardwareConfig, folder: Path, attempt: int) -> Iterator[dict[str, Any]]:
    """Yield what the training loop is told of the ranks: nothing if there is one."""
    check_world_size(started(), hardware)
    if started().world_size == 1:
        yield {}
        return
    from longstraw.parallel.ranks import connect

    def last_word(lost: RankLostError) -> None:
        if rank() == 0 or _inherits(folder, attempt, lost):
            leave_word(folder, status_of(lost), describe(lost), attempt, lost.rank)

    words = words_folder(folder, attempt)
    words.mkdir(parents=True, exist_ok=True)
    with _logged(words / f"{rank()}.log"), connect(hardware, folder, attempt, last_word=last_word) as ranks:
        yield {"ranks": ranks}


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Keep what this rank logs, and what ends it, in a file of its own."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError), path.open("a") as file:
            traceback.print_exc(file=file)
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _inherits(folder: Path, attempt: int, error: BaseException) -> bool:
    """Return whether this rank writes in place of rank 0, which is lost: the first to ask does."""
    if not isinstance(error, RankLostError) or error.rank != 0:
        return False
    words = words_folder(folder, attempt)
    with contextlib.suppress(OSError):
        words.mkdir(parents=True, exist_ok=True)
        (words / "heir").touch(exist_ok=False)
        return True
    return False


def leave_word(
    folder: Path, status: str, reason: str, attempt: int | None = None, failed_rank: int | None = None
) -> None:
    """See to it that the records of a job that ended badly say so, and write its ``result.json``.

    For the job itself and, once it is dead, for the launcher. A line the job wrote itself is left alone, unless it is
    of an attempt before ``attempt``. Once a later one has begun nothing is written.
    """
    if attempt is not None and (latest_attempt(folder) or 0) > attempt:
        return
    row = last_row(folder)
    earlier = row is not None and attempt is not None and (row.get("attempt") or 0) < attempt
    if row is None or earlier or row.get("status") == "ok":
        try:
            append_row(folder, _failure(folder, row or {}, status, reason, failed_rank), attempt)
        except (RecordError, OSError) as error:  # a full disk must not hide what went wrong before
            print(f"longstraw: {error}", file=sys.stderr)
    else:
        status, reason = row["status"], row.get("error") or reason
    try:
        _finish(folder, latest_attempt(folder) or 0 if attempt is None else attempt, status, reason)
    except OSError as error:  # without a result the job counts as failed
        print(f"longstraw: {error}", file=sys.stderr)


def _failure(folder: Path, row: dict[str, Any], status: str, reason: str, failed_rank: int | None) -> dict[str, Any]:
    spec = json.loads((folder / "spec.json").read_text())
    constants: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # what they are made with may be what went wrong
        constants = constant_keys(from_dict(spec["config"]))
    known = {key: row[key] for key in ("commit", "dirty", "versions", "started_at", "device_name") if row.get(key)}
    return {
        **constants,
        **startup_facts(None),
        **known,
        "run_id": spec["run_id"],
        "command": spec["command"],
        "status": status,
        "error": reason,
        "failed_rank": failed_rank,
    }


def _finish(folder: Path, attempt: int, status: str, reason: str | None) -> None:
    if (latest_attempt(folder) or 0) > attempt:  # a later one has begun: the word is its
        return
    result = {"attempt": attempt, "status": status, "error": reason, "host": socket.gethostname()}
    write_json(folder / "result.json", result)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in one step: a reader sees the old one or the new one, whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
