"""Whether this process is one of several ranks, as whoever started it left in the environment. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

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
    start: str = "0"  # tells this start of the job from those before a requeue


def process_info(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Return how this process was started.

    submitit says which executor it used; without it torchrun's variables count, and then those of srun. A batch
    script, which runs once whatever its job's tasks are, is no rank.
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
