"""Submit jobs through submitit: as processes of this machine, or to SLURM with a batch script that submitit writes.

The only module that imports submitit.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longstraw.config import ConfigError, HardwareConfig, RunConfig
from longstraw.launch.placement import visible_gpus
from longstraw.launch.slurm import Queue, SlurmError, Submitted, array_limit, minutes_allowed, refusal
from longstraw.launch.worker import execute
from longstraw.tracking.run_folder import has_result

if TYPE_CHECKING:
    from longstraw.launch.spec import Job


def start_local(job: Job) -> Any:
    """Start one job as a process of this machine, through submitit's local executor; return its handle."""
    import submitit

    executor = submitit.LocalExecutor(folder=job.run_dir / "log")
    executor.update_parameters(**local_parameters(job.config.processes))
    with _stderr_to(job.run_dir / "log" / "controller.err"):
        return executor.submit(execute, str(job.run_dir))


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Redirect stderr of processes started meanwhile to a file: submitit's controller prints a page on Ctrl-C."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def local_parameters(hardware: HardwareConfig) -> dict[str, Any]:
    """Return submitit's parameters for a local job. No warning signal: the launcher reports the time limit."""
    parameters: dict[str, Any] = {
        "timeout_min": hardware.time_min,
        "signal_delay_s": 0,
        "tasks_per_node": hardware.world_size,
        "stderr_to_stdout": True,
        "setup": hardware.setup,
    }
    if hardware.gpus_per_node:
        gpus = [int(name) for name in visible_gpus() if name.isdecimal()]
        parameters |= {"gpus_per_node": hardware.gpus_per_node, "visible_gpus": gpus}
    return parameters


def slurm_parameters(hardware: HardwareConfig) -> dict[str, Any]:
    """Return submitit's parameters for a SLURM job: one task a GPU, or one task a rank on processors."""
    tasks = hardware.gpus_per_node or -(-hardware.world_size // hardware.nodes)
    # When a rank is lost the others end by themselves and name it, which srun does not; srun ends any left after that.
    srun = ["--kill-on-bad-exit=0", f"--wait={hardware.timeout_s}"]
    if hardware.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={hardware.cpus_per_task}")  # since 22.05 srun does not inherit it
    gres = ":".join(filter(None, ("gpu", hardware.gpu, str(hardware.gpus_per_node))))
    parameters: dict[str, Any] = {
        "nodes": hardware.nodes,
        "tasks_per_node": tasks,
        "cpus_per_task": hardware.cpus_per_task,
        "mem_gb": hardware.host_memory_gb,
        "timeout_min": hardware.time_min,
        "stderr_to_stdout": True,
        "slurm_gres": gres if hardware.gpus_per_node else None,
        "slurm_setup": hardware.setup or None,
        "slurm_srun_args": srun,
        "slurm_signal_delay_s": min(hardware.warn_s, hardware.time_min * 60 // 3),
    }
    for key in ("partition", "account", "qos", "constraint", "exclude", "comment"):
        parameters[f"slurm_{key}"] = getattr(hardware, key)
    parameters |= hardware.slurm
    extra = parameters.get("slurm_additional_parameters") or {}
    parameters["slurm_additional_parameters"] = {"requeue": True, **extra}  # some sites do not unless asked to
    return {key: value for key, value in parameters.items() if value is not None}


def slurm_executor(folder: Path, config: RunConfig, cluster: str = "slurm") -> Any:
    """Return a submitit executor that asks for a job's resources; raise ``NameError`` for a key submitit lacks."""
    import submitit

    executor = submitit.AutoExecutor(
        folder=folder / "logs" / "%j", cluster=cluster, slurm_python=config.hardware.python
    )
    executor.update_parameters(name="longstraw", **slurm_parameters(config.hardware))
    if config.launch.max_parallel is not None:
        executor.update_parameters(slurm_array_parallelism=config.launch.max_parallel)
    return executor


def check_slurm(folder: Path, config: RunConfig, asked: dict[str, str]) -> None:
    """Raise ``ConfigError`` with sbatch's message if it would refuse a job; ``asked`` caches its earlier answers."""
    resources = _resources(config)
    if resources not in asked:
        executor = slurm_executor(folder, config)._executor  # submitit's own, which writes the script
        asked[resources] = refusal(executor._make_submission_file_text("true", "")) or _too_long(config.hardware)
    if asked[resources]:
        hardware = config.hardware
        raise ConfigError(f"hardware={hardware.name}, hardware.partition={hardware.partition}: {asked[resources]}")


def _too_long(hardware: HardwareConfig) -> str:
    """Return by how much a job exceeds its partition's time limit: sbatch accepts such a job and never starts it."""
    if hardware.partition is None or hardware.qos is not None:  # a quality of service may allow more
        return ""
    allowed = minutes_allowed(hardware.partition)
    if allowed is None or hardware.time_min <= allowed:
        return ""
    return f"hardware.time_min={hardware.time_min} is more than the {allowed} min that the partition allows"


def _resources(config: RunConfig) -> str:
    return json.dumps([slurm_parameters(config.hardware), config.hardware.python], sort_keys=True)


def check_path(run_dir: Path, executor: str) -> None:
    """Raise ``ConfigError`` if the folder's path contains the placeholder for a job's number in log names."""
    signs = ("%",) if executor == "slurm" else ("%j", "%t", "%A", "%a")
    path = str(run_dir.absolute())
    if found := next((sign for sign in signs if sign in path), None):
        what = "sbatch reads it as a sign" if executor == "slurm" else "submitit puts the job's number there"
        raise ConfigError(f"the folder {path} has {found} in its name, and {what}; choose, or rename to, another one")


def submit_slurm(jobs: Sequence[Job], folder: Path, cluster: str = "slurm") -> dict[Path, Any]:
    """Submit the jobs, in arrays of one set of resources no longer than the site's limit; return handles by folder.

    All or none: if sbatch refuses one array, the earlier ones are cancelled and ``ConfigError`` has sbatch's message.
    """
    arrays: dict[str, list[Job]] = {}
    for job in jobs:
        arrays.setdefault(_resources(job.config), []).append(job)
    queue, handles = Queue(), {}
    try:
        limit = array_limit() if len(jobs) > 1 else 1
        for array in arrays.values():
            for start in range(0, len(array), limit):
                part = array[start : start + limit]
                executor = slurm_executor(folder, part[0].config, cluster)
                submitted = executor.map_array(execute, [str(job.run_dir) for job in part])
                for job, handle in zip(part, submitted, strict=True):
                    done = functools.partial(has_result, job.run_dir)
                    handles[job.run_dir] = Submitted(handle.job_id, handle.paths, queue, done)
    except (SlurmError, RuntimeError, OSError) as error:
        for handle in handles.values():
            handle.cancel(check=False)
        message = "; ".join(filter(None, (line.strip() for line in str(error).splitlines())))
        raise ConfigError(f"SLURM refused some of {len(jobs)} jobs, so none was submitted: {message}") from None
    return handles
