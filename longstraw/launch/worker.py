"""Run one job, in each of its processes, from its frozen ``spec.json`` to its records.

submitit pickles only the path of the run folder, so the frozen configuration is what runs, also after a requeue.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstraw.config import HardwareConfig, RunConfig, from_dict
from longstraw.errors import RankLostError, TooLargeError, describe, status_of
from longstraw.launch.result import record_failure, write_result
from longstraw.launch.slurm import SlurmError, own_id, requeue
from longstraw.runtime.failure_files import failure_fields, ranks_folder, write_failure
from longstraw.runtime.machine_memory import memory_limits
from longstraw.runtime.preemption import Preempted, Stop, Superseded
from longstraw.runtime.process_info import check_world_size, folder_identity, process_identity, process_info, threads
from longstraw.tracking.recorder import RunIdentity
from longstraw.tracking.run_folder import last_row, write_json
from longstraw.tracking.schema import RecordError, latest_attempt, records_path

if TYPE_CHECKING:
    from longstraw.runtime.rendezvous import Ranks

log = logging.getLogger(__name__)

LEAVE_SECONDS = 60  # for SLURM to end a job that was requeued


def execute(run_dir: str | Path) -> int | None:
    """Run the job that ``run_dir/spec.json`` describes and write ``result.json``; raise what the job raised.

    Returns the number of the signal that ended it before its last step, if one did. Every rank of a job calls this.
    The last record says how the job ended; rank 0 writes it or, if rank 0 is lost, another rank. Each rank that fails
    writes its reason to a file, and each rank has its own log.
    """
    folder = Path(run_dir)
    try:
        with _note_signals():
            stopped, config, ran = _run(folder)
    except KeyboardInterrupt:
        if process_info().by != "local":
            raise
        raise SystemExit(128 + signal.SIGINT) from None  # the launcher was interrupted too and writes the record
    if stopped is None:
        return None
    if rank() == 0:
        _requeue(config, stopped, ran)
    return int(stopped.signal or signal.SIGTERM)


def _note_signals() -> contextlib.AbstractContextManager[Any]:
    """Note signals that come before or after the loop handles them, which submitit would ignore or die of.

    Importing torch and connecting the ranks can take longer than a site waits. A job that a user started in a terminal
    ends at once instead.
    """
    return Stop().listening() if process_info().by in ("slurm", "local") else contextlib.nullcontext()


def _run(folder: Path) -> tuple[Preempted | None, RunConfig, float]:
    """Run a job; return why it stopped early (or None), its configuration and the seconds it took."""
    spec = json.loads((folder / "spec.json").read_text())
    attempt = spec.get("first_attempt", 0) + int(os.environ.get("SLURM_RESTART_COUNT", 0))
    _check_attempt(folder, attempt)
    if rank() == 0:
        with contextlib.suppress(OSError):  # errors of the folder are raised below
            (folder / "result.json").unlink(missing_ok=True)  # an earlier attempt's
            process = {"attempt": attempt, "folder": folder_identity(folder), **process_identity()}
            write_json(folder / "process.json", process)
    began = time.monotonic()
    try:
        config = from_dict(spec["config"])
        _prepare_process(config.hardware.backend)
        refusal = _predict(config) if rank() == 0 else None
        run_job = _loop(config.mode)
        identity = RunIdentity(spec["run_id"], attempt, spec["sweep"], spec["command"], spec["overrides"])
        with _connected(config.processes, folder, attempt) as ranks:
            if refusal is not None:
                raise TooLargeError(refusal)
            several = () if ranks is None else (ranks,)
            stopped = run_job(config, folder, identity, *several)
    except Superseded:
        raise
    except Exception as error:
        if rank() == 0 or claim_failover(folder, attempt, error):
            with contextlib.suppress(OSError):  # such as a full disk, whose consequence is the error the user needs
                (folder / "error.txt").write_text(traceback.format_exc())
            record_failure(folder, status_of(error), describe(error), attempt, failed_rank(error))
        if process_info().world_size > 1:
            own = RankLostError(rank(), socket.gethostname(), f"failed: {describe(error)}", status_of(error))
            lost = error if isinstance(error, RankLostError) else own
            write_failure(ranks_folder(folder, attempt), rank(), failure_fields(lost))  # unless it has left one
        raise
    if rank() == 0:
        row = last_row(folder) or {}
        write_result(folder, attempt, row.get("status") or "ok", row.get("error"))
    return stopped, config, time.monotonic() - began


def _check_attempt(folder: Path, attempt: int) -> None:
    """Raise if this attempt or a later one has already begun: their records must not be changed."""
    latest = latest_attempt(folder)
    if latest is not None and latest > attempt:
        raise Superseded(f"attempt {latest} of this job has begun, so attempt {attempt} ends and writes nothing")
    path = records_path(folder, attempt)
    if rank() == 0 and path.exists() and path.stat().st_size:
        error = RecordError(
            f"{path} holds the records of this attempt; nothing was changed. Go on with the job: "
            f"python -m longstraw.status {shlex.quote(str(folder))} --again"
        )
        if process_info().world_size > 1:  # the others wait for this rank
            lost = RankLostError(0, socket.gethostname(), f"failed: {error}")
            write_failure(ranks_folder(folder, attempt), 0, failure_fields(lost))
        raise error


def _loop(mode: str) -> Callable[..., Preempted | None]:
    """Return the function that runs, simulates or emulates a job's steps; imports torch."""
    if mode == "simulate":
        from longstraw.simulation.jobs import simulate_job

        return simulate_job
    if mode == "emulate":
        from longstraw.simulation.jobs import emulate_job

        return emulate_job
    from longstraw.training.loop import run_job

    return run_job


def _predict(config: RunConfig) -> str | None:
    """Predict what the job's rows compare their counts with; return why it cannot fit this machine, if it cannot.

    A prediction that fails is no reason not to run: what is predicted is null then. Nor is one made of a job on
    processors that is far too small to matter, nor one of several ranks, unless it is known already: a count takes
    seconds to minutes, in which the other ranks would wait for this one.
    """
    from longstraw.memory.estimate import known  # here: what asks for less starts sooner
    from longstraw.memory.fit import machine_refuses, predicted

    with prediction_may_fail():
        if config.mode in ("simulate", "emulate"):
            predicted(config)
        elif process_info().world_size == 1 or known(config) is not None:
            return machine_refuses(config, memory_limits(), process_info().local_world_size)
    return None


@contextlib.contextmanager
def prediction_may_fail() -> Iterator[None]:
    """Turn an exception of the block into a warning: a job is not kept from running because none could predict it."""
    try:
        yield
    except Exception as error:
        log.warning("memory cannot be predicted: %s", describe(error))


def _requeue(config: RunConfig, stopped: Preempted, ran: float) -> None:
    """Requeue the job, unless it would never get further; raise ``stopped`` if it may not be requeued."""
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
            time.sleep(LEAVE_SECONDS)  # wait to be ended: SLURM does not restart a job that ends by itself
    except SlurmError as error:
        print(f"longstraw: SLURM does not take the job back: {error}", file=sys.stderr)


def rank() -> int:
    """Return this process's rank according to submitit, SLURM or torchrun; 0 without any of them."""
    return process_info().rank


def failed_rank(error: BaseException) -> int:
    """Return the rank that caused an exception."""
    return error.rank if isinstance(error, RankLostError) else rank()


def _prepare_process(backend: str) -> None:
    """Set the environment variables that torch, Triton and fla read when they are imported; what is set stays."""
    # Threads that spin while they wait are three times slower as soon as anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if process_info().world_size > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads(process_info())))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise a lost rank prints a page of C++ frames
    if backend == "cuda":
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # fewer gaps between segments
        os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")  # an installed tilelang would replace its kernels
        # Ranks of several nodes that compile into one folder on NFS can fail (triton-lang/triton, issue 11512).
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"longstraw-triton-{os.getuid()}"))


@contextlib.contextmanager
def _connected(hardware: HardwareConfig, folder: Path, attempt: int) -> Iterator[Ranks | None]:
    """Yield this process's place among the ranks; ``None`` if there is one rank."""
    check_world_size(process_info(), hardware)
    if process_info().world_size == 1:
        yield None
        return
    from longstraw.runtime.rendezvous import connect

    def before_exit(lost: RankLostError) -> None:
        if rank() == 0 or claim_failover(folder, attempt, lost):
            record_failure(folder, status_of(lost), describe(lost), attempt, lost.rank)

    own = ranks_folder(folder, attempt)
    own.mkdir(parents=True, exist_ok=True)
    with _logged(own / f"{rank()}.log"), connect(hardware, folder, attempt, before_exit=before_exit) as ranks:
        yield ranks


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Write this rank's log messages, and the exception that ends it, to its own file."""
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


def claim_failover(folder: Path, attempt: int, error: BaseException) -> bool:
    """Return whether this rank writes the record in place of the lost rank 0: the first rank to call this does."""
    if not isinstance(error, RankLostError) or error.rank != 0:
        return False
    ranks = ranks_folder(folder, attempt)
    with contextlib.suppress(OSError):
        ranks.mkdir(parents=True, exist_ok=True)
        (ranks / "failover").touch(exist_ok=False)
        return True
    return False
