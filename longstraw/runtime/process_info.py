"""Read this process's rank from the environment, and find out whether a recorded process still runs. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.config import ConfigError, HardwareConfig

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ProcessInfo:
    """This process among those started with it; ``by`` is ``local``, ``slurm``, ``torchrun`` or, alone, empty."""

    by: str = ""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    start: str = "0"  # distinguishes this start of the job from those before a requeue


def process_info(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Return how this process was started.

    submitit's variables are used first, then torchrun's, then srun's. A batch script is no rank: it runs once, however
    many tasks its job has.
    """

    def number(key: str, default: int) -> int:
        return int(environment.get(key, default))

    executor = environment.get("SUBMITIT_EXECUTOR")
    if executor == "local":
        world = number("SUBMITIT_LOCAL_NTASKS", 1)
        rank, local = number("SUBMITIT_LOCAL_GLOBALID", 0), number("SUBMITIT_LOCAL_LOCALID", 0)
        job = environment.get("SUBMITIT_LOCAL_JOB_ID", "0")
        return ProcessInfo("local", rank, world, local, world, number("SUBMITIT_LOCAL_NODEID", 0), job)
    if executor is None and all(key in environment for key in TORCHRUN):
        rank, world, local = number("RANK", 0), number("WORLD_SIZE", 1), number("LOCAL_RANK", 0)
        here, restart = number("LOCAL_WORLD_SIZE", world), environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return ProcessInfo("torchrun", rank, world, local, here, number("GROUP_RANK", 0), restart)
    world, nodes = number("SLURM_STEP_NUM_TASKS", 1), number("SLURM_STEP_NUM_NODES", 1)
    return ProcessInfo(
        "slurm" if "SLURM_PROCID" in environment else "",
        number("SLURM_PROCID", 0),
        world,
        number("SLURM_LOCALID", 0),
        -(-world // nodes),
        number("SLURM_NODEID", 0),
        f"{environment.get('SLURM_JOB_ID', '0')}.{environment.get('SLURM_RESTART_COUNT', '0')}",
    )


def check_world_size(me: ProcessInfo, hardware: HardwareConfig) -> None:
    """Raise ``ConfigError`` unless as many ranks were started as ``hardware`` has."""
    if me.world_size == hardware.world_size:
        return
    name, wanted = f"hardware={hardware.name}", hardware.world_size
    if me.by == "torchrun":
        raise ConfigError(
            f"torchrun started {me.world_size} ranks and {name} has {wanted}: give hardware.ranks={me.world_size}, or "
            f"torchrun's --nproc-per-node so that nodes x processes are {wanted}"
        )
    raise ConfigError(
        f"{name} has {wanted} ranks and {me.world_size} {'was' if me.world_size == 1 else 'were'} started"
        f"{' by ' + me.by if me.by else ''}: start the job with `python -m longstraw.run`, which starts its ranks"
    )


def threads(me: ProcessInfo, environment: Mapping[str, str] = os.environ) -> int:
    """Return how many threads this rank computes with: ``OMP_NUM_THREADS``, or its share of the machine's cores."""
    if "OMP_NUM_THREADS" in environment:
        return int(environment["OMP_NUM_THREADS"].split(",")[0])
    if me.by == "slurm" and "SLURM_CPUS_PER_TASK" in environment:
        return int(environment["SLURM_CPUS_PER_TASK"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // me.local_world_size)


def process_identity(pid: int | None = None) -> dict[str, Any]:
    """Return what identifies a process (this one by default): host, process id, time of start.

    The id alone does not: another process gets it later.
    """
    pid = os.getpid() if pid is None else pid
    started, namespace = _proc_state(pid)[1], _pid_namespace()
    return {"host": socket.gethostname(), "pid": pid, "started": started, "pid_namespace": namespace}


def is_running(identity: Mapping[str, Any]) -> bool | None:
    """Return whether the process of ``process_identity`` still runs; ``None`` if it cannot be seen from here.

    Processes on another host or in another container cannot be seen. A zombie does not count as running.
    """
    if identity.get("host") != socket.gethostname():
        return None
    if _boot(identity.get("started")) != _boot(_proc_state(os.getpid())[1]):
        return False  # the machine was restarted
    if identity.get("pid_namespace") != _pid_namespace():
        return None
    state, started = _proc_state(identity["pid"])
    if state:
        return state not in "ZX" and started == identity.get("started")
    try:
        os.kill(identity["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, hidden from /proc
        return None
    return True  # a system without /proc


def folder_identity(folder: Path) -> dict[str, Any]:
    """Return what distinguishes a folder from its copies."""
    return {"path": str(folder.resolve()), "inode": folder.stat().st_ino}


def is_copy(folder: Path, identity: Mapping[str, Any] | None) -> bool:
    """Return whether ``folder`` is a copy of the folder that ``folder_identity`` described; a moved one is not."""
    return identity is not None and all(identity[key] != value for key, value in folder_identity(folder).items())


def _proc_state(pid: int) -> tuple[str, str | None]:
    """Return the state letter of a process and when it started: the boot, and clock ticks since; empty if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before may hold anything
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "", None
    return fields[0], f"{boot}/{fields[19]}"


def _boot(started: str | None) -> str:
    return (started or "").partition("/")[0]


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
