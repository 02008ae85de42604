"""Configuration of where and how a job runs: hardware, SLURM, simulation and launch. Part of ``config.run``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from longstraw.config.checks import ConfigError, check_ranges, choose, number


@dataclass
class RatesConfig:
    """What one device reaches on its own, for predicted times; ``conf/hardware`` names the sources. None: not known."""

    products: float | None = number(None, 0, 1e6, above=True)  # TFLOP/s of matrix products in 16 bit
    products_float32: float | None = number(None, 0, 1e6, above=True)  # the same in float32
    scan: float | None = number(None, 0, 1e6, above=True)  # the same of the gated delta rule and its convolution
    attention: float | None = number(None, 0, 1e6, above=True)  # TFLOP/s of softmax attention
    attention_backward: float | None = number(None, 0, 1e6, above=True)  # and of its backward
    chosen_rows: float | None = number(None, 0, 1e6, above=True)  # and of attention to chosen rows
    scores: float | None = number(None, 0, 1e6, above=True)  # and of the scores by which they are chosen
    memory: float | None = number(None, 0, 1e6, above=True)  # TB/s, read and written
    links: float | None = number(None, 0, 1e6, above=True)  # GB/s that a rank sends within a node
    links_across: float | None = number(None, 0, 1e6, above=True)  # GB/s that a rank sends to other nodes
    operation_us: float | None = number(None, 0, 1e6)  # of the host for each operation it dispatches

    def __post_init__(self) -> None:
        check_ranges(self, "hardware.rates")

    @property
    def known(self) -> bool:
        return None not in vars(self).values()


@dataclass
class HardwareConfig:
    """Where a job runs and what it asks of SLURM. ``ranks`` is nodes x gpus_per_node unless set (on a CPU: 1)."""

    name: str = MISSING
    backend: str = "cuda"  # cpu | cuda: the implementation of the ops, chosen when the model is built
    nodes: int = number(1, 1, 2**20)
    gpus_per_node: int = number(0, 0, 1024)
    ranks: int | None = number(None, 1, 2**20)
    dp: int = number(1, 1, 2**20)  # groups of ranks, each with its own prompts; the ranks of a group share positions
    ep: int | None = number(None, 1, 2**20)  # ranks that the experts are divided among; None: as many as divide both
    gpu: str | None = None  # the name in --gres=gpu:NAME:COUNT
    memory_gb: float | None = number(None, 0, 1e6, above=True)  # of one device; None: not known, nothing is refused
    reserve_gb: float = number(0.0, 0, 1e6)  # kept for the CUDA context and communication buffers
    rates: RatesConfig = field(default_factory=RatesConfig)
    cpus_per_task: int | None = number(None, 1, 2**16)
    host_memory_gb: float | None = number(None, 0, 1e7, above=True)
    time_min: int = number(24 * 60, 1, 2**24)  # the job's limit in minutes, on SLURM and for local subprocesses alike
    warn_s: int = number(
        300, 1, 2**24
    )  # SLURM signals a job so long before its limit: time for one chunk and a checkpoint
    timeout_s: int = number(
        1800, 1, 2**24
    )  # after which ranks that wait for a dead one give up; a first compilation on one node can take over 10 minutes
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
        check_ranges(self, "hardware")
        if self.memory_gb is not None and self.reserve_gb >= self.memory_gb:
            raise ConfigError(
                f"hardware.memory_gb={self.memory_gb:g} with hardware.reserve_gb={self.reserve_gb:g}: the memory must "
                "be more than what is kept of it"
            )

    @property
    def world_size(self) -> int:
        return self.ranks if self.ranks is not None else self.nodes * max(self.gpus_per_node, 1)

    def for_one_rank(self, device: bool) -> HardwareConfig:
        """Return the hardware for one process that simulates (no ``device``) or emulates (one) a rank of this one."""
        gpus = min(self.gpus_per_node, 1) if device else 0
        backend = self.backend if device else "cpu"
        return replace(self, backend=backend, nodes=1, gpus_per_node=gpus, ranks=1, dp=1, ep=None)


@dataclass
class SimulationConfig:
    """Which rank ``mode=simulate`` and ``mode=emulate`` run, and how."""

    rank: int = number(0, 0, 2**20)  # the rank that is simulated
    imbalance: float = number(1.0, 0, 1e6)  # tokens for its experts, over an even share
    every: bool = False  # evaluate every chunk, branch and block, not only those that decide the peak

    def __post_init__(self) -> None:
        check_ranges(self, "simulation")


@dataclass
class LaunchConfig:
    max_parallel: int | None = number(None, 1, 2**16)  # jobs at a time; None: 1 here, no limit on SLURM
    detach: bool = False  # submit and return at once

    def __post_init__(self) -> None:
        check_ranges(self, "launch")
