"""Decide where a job runs: on this machine, through SLURM, or nowhere if its hardware is missing. Starts nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longstraw.config import ConfigError, HardwareConfig, RunConfig
from longstraw.launch.slurm import is_configured
from longstraw.parallel.parallel_dims import resolve_dims
from longstraw.runtime.process_info import check_world_size, process_info

NEEDS_NONE = "mode=simulate needs no hardware, and model=qwen3_6_tiny hardware=cpu runs on any machine"


@dataclass(frozen=True)
class Placement:
    """Where a job runs: ``mode`` never ``auto``; ``executor`` ``local``, ``slurm`` or ``none`` (no such hardware)."""

    mode: str
    executor: str
    why: str  # printed when the command starts


def resolve(config: RunConfig) -> Placement:
    """Return where and in which mode a job will run; raise ``ConfigError`` saying what is missing."""
    placement = find(config.hardware)
    if config.mode in ("simulate", "emulate") or (config.mode == "auto" and placement.executor == "none"):
        return _single_rank_placement(config, placement)
    if placement.executor == "none":
        raise ConfigError(f"mode=run: {placement.why}; {NEEDS_NONE}")
    _check_ranks(config, placement)
    return placement


def _single_rank_placement(config: RunConfig, placement: Placement) -> Placement:
    """Return the placement of ``simulate`` and ``emulate``: one process on this machine."""
    name = f"hardware={config.hardware.name}"
    if process_info().world_size > 1:
        raise ConfigError(f"mode={config.mode} is one process, whatever the ranks: start it without torchrun or srun")
    resolve_dims(config.model, config.hardware)
    if config.rollout == "sample":
        raise ConfigError(f"{placement.why}, and rollout=sample cannot be simulated; {NEEDS_NONE} with rollout=given")
    if config.mode == "auto":
        return Placement("simulate", "local", placement.why)
    if config.mode == "simulate":
        return Placement("simulate", "local", f"{name} is not touched")
    if config.hardware.backend == "cuda" and not visible_gpus():
        raise ConfigError(f"mode=emulate runs a rank of {name} on one GPU, and no GPU is visible here; {NEEDS_NONE}")
    return Placement("emulate", "local", f"rank {config.simulation.rank} of {name}; its values mean nothing")


def _check_ranks(config: RunConfig, placement: Placement) -> None:
    """Raise ``ConfigError`` if the job's ranks cannot be started, or if torchrun or srun started a wrong number."""
    hardware, me, name = config.hardware, process_info(), f"hardware={config.hardware.name}"
    resolve_dims(config.model, hardware)
    if me.by == "torchrun":
        check_world_size(me, hardware)
        if config.launch.detach:
            raise ConfigError("launch.detach=true: torchrun waits for the ranks it started; leave one of the two out")
    elif me.by == "slurm" and me.world_size > 1:
        raise ConfigError(
            f"srun started this command {me.world_size} times; start it once, it starts the ranks of {name} itself, or "
            "let srun start torchrun on each node"
        )
    elif placement.executor == "local" and hardware.nodes > 1:
        raise ConfigError(
            f"{name} has {hardware.nodes} nodes and the job would run on this one alone ({placement.why}); start it "
            "outside an allocation with hardware.partition=..., or with torchrun on each node"
        )


def find(hardware: HardwareConfig) -> Placement:
    """Return where ``hardware`` is: on this machine if it has it, else through SLURM."""
    name = f"hardware={hardware.name}"
    if (me := process_info()).by == "torchrun":
        return Placement(
            "run", "local", f"{me.world_size} rank{'s' * (me.world_size > 1)} that torchrun started ({name})"
        )
    sbatch = hardware.partition is not None and shutil.which("sbatch") is not None and is_configured()
    if "SLURM_JOB_ID" in os.environ:
        return Placement("run", "local", f"inside SLURM job {os.environ['SLURM_JOB_ID']}")
    if hardware.backend == "cpu":
        if sbatch:
            return Placement("run", "slurm", f"through SLURM, partition {hardware.partition} ({name})")
        ranks = f"{hardware.world_size} ranks " if hardware.world_size > 1 else ""
        return Placement("run", "local", f"{ranks}on this machine's processor ({name})")
    wanted, visible = hardware.nodes * max(hardware.gpus_per_node, 1), len(visible_gpus())
    if hardware.nodes == 1 and visible >= wanted:
        return Placement("run", "local", f"on {wanted} GPU{'s' * (wanted > 1)} of this machine ({name})")
    if sbatch:
        return Placement("run", "slurm", f"through SLURM, partition {hardware.partition} ({name})")
    lacks = "hardware.partition names no SLURM partition"
    if hardware.partition is not None:
        lacks = "sbatch is not on PATH" if shutil.which("sbatch") is None else "SLURM's commands know no cluster"
    shape = (
        f"{hardware.nodes} nodes with {hardware.gpus_per_node} GPUs each"
        if hardware.nodes > 1
        else f"{wanted} GPU{'s' * (wanted > 1)}"
    )
    return Placement("simulate", "none", f"{name} wants {shape}, {visible} visible here and {lacks}")


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """Return the names CUDA would take for this machine's GPUs, without importing torch.

    ``CUDA_VISIBLE_DEVICES`` narrows what the driver offers; an empty one hides all.
    """
    present = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*")]
    if not present and shutil.which("nvidia-smi"):  # the driver is elsewhere, as under WSL
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
        present = [str(i) for i, line in enumerate(listing.stdout.splitlines()) if line.startswith("GPU ")]
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return sorted(present, key=int)
    listed = [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return listed[: len(present)]
