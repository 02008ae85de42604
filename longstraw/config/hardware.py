"""Where a job runs and how it is dispatched, as typed objects; offered by ``config.py`` with the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from longstraw.config.checks import ConfigError, at_least, choose


@dataclass
class HardwareConfig:
    """Where a job runs and what it asks of SLURM. ``ranks`` is nodes x gpus_per_node unless set (on a CPU: 1)."""

    name: str = MISSING
    backend: str = "cuda"  # cpu | cuda: which implementation of each op is taken, once, when the model is built
    nodes: int = 1
    gpus_per_node: int = 0
    ranks: int | None = None
    dp: int = 1  # groups of ranks that each take a prompt of their own; the ranks of one share its positions
    ep: int | None = None  # ranks that the experts are shared out over; None: as many as divide both
    gpu: str | None = None  # the name in --gres=gpu:NAME:COUNT
    memory_gb: float | None = None  # of one device, 10^9 bytes; None: not known, and nothing is refused
    reserve_gb: float = 0.0  # of it, kept for the CUDA context and communication buffers
    cpus_per_task: int | None = None
    host_memory_gb: float | None = None
    time_min: int = 24 * 60  # the job's limit in minutes, on SLURM and for local subprocesses alike
    warn_s: int = 300  # SLURM tells a job so long before its limit: time for one chunk or branch, and a checkpoint
    timeout_s: int = 600  # after which ranks that wait for a dead one give up
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    comment: str | None = None
    setup: list[str] = field(default_factory=list)  # shell lines before the job's command
    python: str | None = None  # starts Python on a node, such as "apptainer exec --nv image.sif python"; None: this one
    slurm: dict[str, Any] = field(default_factory=dict)  # further submitit parameters, such as slurm_mail_user

    def __post_init__(self) -> None:
        choose("hardware.backend", self.backend, ("cpu", "cuda"))
        for key in ("nodes", "ranks", "dp", "ep", "time_min", "timeout_s", "warn_s", "cpus_per_task"):
            at_least(f"hardware.{key}", getattr(self, key), 1)
        memory = self.memory_gb
        if memory is not None and not 0 <= self.reserve_gb < memory < math.inf:  # false for NaN too
            raise ConfigError(
                f"hardware.memory_gb={memory:g} with hardware.reserve_gb={self.reserve_gb:g}: the memory must be "
                "finite and more than what is kept of it"
            )

    @property
    def world_size(self) -> int:
        return self.ranks if self.ranks is not None else self.nodes * max(self.gpus_per_node, 1)

    def played(self, device: bool) -> HardwareConfig:
        """Return what one process asks for that plays a rank of this hardware, on one such ``device`` or on none."""
        gpus = min(self.gpus_per_node, 1) if device else 0
        backend = self.backend if device else "cpu"
        return replace(self, backend=backend, nodes=1, gpus_per_node=gpus, ranks=1, dp=1, ep=None)


@dataclass
class SimulationConfig:
    """What ``mode=simulate`` and ``mode=emulate`` play."""

    rank: int = 0  # the one rank that is played
    imbalance: float = 1.0  # tokens that come to its experts, over an even share
    every: bool = False  # evaluate every chunk, branch and block, not only those that decide the peak

    def __post_init__(self) -> None:
        at_least("simulation.rank", self.rank, 0)
        at_least("simulation.imbalance", self.imbalance, 0)


@dataclass
class LaunchConfig:
    max_parallel: int | None = None  # jobs of a sweep at a time; None: 1 on this machine, the site's limit on SLURM
    detach: bool = False  # submit and return at once

    def __post_init__(self) -> None:
        at_least("launch.max_parallel", self.max_parallel, 1)
