"""Small parts of a run's configuration: adapter, optimizer, retained state, checkpoints and tracking."""

from __future__ import annotations

from dataclasses import dataclass, field

from longstraw.config.checks import ConfigError, check_ranges, choose, number

ROW_DTYPES = ("float32", "bfloat16")
STEPS = 10**9


@dataclass
class AdapterConfig:
    """What is trained: with ``none`` every parameter, with ``lora`` low-rank adapters on a frozen model.

    ``auto`` takes the model's ``default_adapter`` and does not occur in a finished ``RunConfig``.
    """

    name: str = "none"
    rank: int = number(16, 1, 2**16)
    alpha: int = number(32, 1, 2**24)  # what an adapter adds is scaled by alpha / rank
    targets: list[str] = field(default_factory=list)  # module names such as q_proj; empty: the architecture's own list
    checkpoint: str | None = None  # a folder in PEFT's format to start from; its own rank, alpha and targets hold

    def __post_init__(self) -> None:
        choose("adapter", self.name, ("auto", "none", "lora"))
        check_ranges(self, "adapter")


@dataclass
class OptimizerConfig:
    name: str = "adamw"  # adamw | none: gradients only
    lr: float = number(1e-6, 0, 100)
    betas: list[float] = number([0.9, 0.999], 0, 1)
    eps: float = number(1e-8, 1e-30, 1)  # 0 would give 0 / 0 for a gradient of 0
    weight_decay: float = number(0.0, 0, 100)
    max_grad_norm: float | None = number(1.0, 0, 1e9, above=True, hint="; null: no clipping")
    gradient_dtype: str = (
        "float32"  # float32 | model: dtype in which gradients are accumulated if the model's is narrower
    )
    device: str | None = None  # cpu: parameters are updated and optimizer state kept in host memory; None: the model's

    def __post_init__(self) -> None:
        choose("optimizer.name", self.name, ("adamw", "none"))
        choose("optimizer.gradient_dtype", self.gradient_dtype, ("float32", "model"))
        if self.device is not None:
            choose("optimizer.device", self.device, ("cpu",))
        check_ranges(self, "optimizer")
        if len(self.betas) != 2 or 1 in self.betas:
            raise ConfigError(f"optimizer.betas={self.betas} must be two numbers from 0 to below 1")


@dataclass
class StateConfig:
    """How retained rows (keys and values, latents) are stored, and what attending to them leaves for the backward.

    States of fixed size are not affected.
    """

    dtype: str | None = None  # float32 | bfloat16; None: the model's
    gradient_dtype: str | None = None  # of their gradient: float32 | bfloat16; None: at least float32
    device: str | None = None  # cpu: in host memory, copied to the device when they are read; None: the model's
    keep_attention: bool = False  # attention's results stay until their backward, instead of being made again for it

    def __post_init__(self) -> None:
        for key, names in (("dtype", ROW_DTYPES), ("gradient_dtype", ROW_DTYPES), ("device", ("cpu",))):
            if getattr(self, key) is not None:
                choose(f"state.{key}", getattr(self, key), names)


@dataclass
class CheckpointConfig:
    """When checkpoints are written: at a refresh of the prompt only, and always when the job is asked to end."""

    every: int | None = number(None, 1, STEPS)  # optimizer steps between two; None: by ``minutes``
    minutes: float = number(10.0, 0, 2**24)
    keep_last: int = number(2, 1, STEPS)
    requeue: bool = True  # once asked to end, go back into SLURM's queue and continue

    def __post_init__(self) -> None:
        check_ranges(self, "checkpoint")


@dataclass
class TrackingConfig:
    """The copy of the records in W&B. ``auto``: online where a key is configured, offline otherwise."""

    mode: str = "auto"
    project: str = "longstraw"
    entity: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        choose("tracking.mode", self.mode, ("auto", "online", "offline", "disabled"))
