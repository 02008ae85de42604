"""Compare every fused operation with its reference on this GPU: ``python -m longstraw.selfcheck [key=value ...]``.

A compiler may turn a right kernel into wrong code, which shows only on the GPU itself. Inputs are drawn at a model's
own widths, in its dtype, with the heads that a rank has of them: another number of heads is another kernel. Each
operation of the backend runs forward and backward, the reference the same in at least float32 on the same device, and
results and all gradients are compared by relative L2. A CUDA job does this before anything else; it also compiles the
kernels before ranks wait for each other.

The exit status is 0 if all passed, 1 if not, 2 for invalid arguments. T positions, P retained ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longstraw.config import (
    DTYPES,
    ConfigError,
    HardwareConfig,
    ModelConfig,
    RunConfig,
    at_least,
    choose,
    load_model_config,
)
from longstraw.config.settings import parse_settings
from longstraw.layers.op_cases import Case, Draw, differentiated
from longstraw.models import build_model
from longstraw.ops import BACKENDS, Ops, choose_ops
from longstraw.ops.sequence_ops import Local
from longstraw.parallel.parallel_dims import resolve_dims
from longstraw.state import Tensors

# Far above what rounding gives (1e-6 and 6e-3; float32 products on tensor cores 1e-3), far below what an error gives.
BARS = {torch.float64: 1e-9, torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
VOCABULARY = 32_768  # rows of the head that are checked at most: further ones are more of the same tiles


class SelfCheckError(RuntimeError):
    """An operation differs from its reference on this device."""


@dataclass(frozen=True)
class Settings:
    """What is checked; the fields are the keys of the command line."""

    model: str = "qwen3_6_27b"  # a name in conf/model
    backend: str = "cuda"
    device: str = "cuda"
    dtype: str | None = None  # None: the model's
    positions: int = 512  # T
    rows: int = 4096  # P
    cp: int = 1  # ranks that share a prompt, and with it the heads of a delta rule and the vocabulary
    seed: int = 0

    def __post_init__(self) -> None:
        choose("backend", self.backend, BACKENDS)
        choose("device", self.device.partition(":")[0], ("cpu", "cuda"))
        if self.dtype is not None:
            choose("dtype", self.dtype, DTYPES)
        at_least("positions", self.positions, 1)
        at_least("rows", self.rows, 1)
        at_least("cp", self.cp, 1)
        if self.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"device={self.device}: this machine has no GPU that PyTorch can use; device=cpu is one")


@dataclass(frozen=True)
class Finding:
    """How far one tensor of one operation is from its reference's, in relative L2."""

    op: str
    tensor: str
    distance: float
    bar: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.distance < self.bar


def check_ops(
    config: ModelConfig, draw: Draw, *, backend: str, positions: int = 512, rows: int = 4096, cp: int = 1
) -> list[Finding]:
    """Compare each operation that ``config``'s layers call with its reference; return what was found, worst first.

    ``draw`` makes the inputs, on the device and in the dtype that are checked; ``cp`` is the number of ranks that share
    a prompt. Raises ``ConfigError`` where they cannot divide the model's heads.
    """
    fused, reference = choose_ops(backend), choose_ops("reference")
    findings = []
    for name, inputs, run in _cases(config, draw, positions, rows, cp):
        values = run(fused, inputs)
        targets = run(reference, {key: _widened(x) for key, x in inputs.items()})
        bar = BARS[draw.dtype]
        findings += [Finding(name, key, _distance(x, targets[key]), bar) for key, x in values.items()]
    return sorted(findings, key=lambda x: -x.distance if x.distance == x.distance else -math.inf)


def require(findings: Sequence[Finding], device: torch.device) -> None:
    """Raise ``SelfCheckError`` that names every tensor beyond its bar, the device and the versions."""
    failed = [x for x in findings if not x.passed]
    if failed:
        what = "; ".join(f"{x.op}: {x.tensor} is off by {x.distance:.1e} (bar {x.bar:.0e})" for x in failed)
        raise SelfCheckError(f"self-check failed on {_place(device)}: {what}. selfcheck=off trains without the check")


def check_job(config: RunConfig) -> tuple[str | None, Exception | None]:
    """Check a CUDA job's operations at its model's widths, and free what that took.

    Returns what the record says (null where there is nothing to check, ``off``, ``passed`` or ``failed``) and why it
    failed, for the job to raise where its record is.
    """
    if config.hardware.backend != "cuda":
        return None, None
    if config.selfcheck == "off":
        return "off", None
    device = torch.device("cuda")
    try:
        draw = Draw(device, getattr(torch, config.model.dtype), 0)
        cp = resolve_dims(config.model, config.hardware).cp
        require(check_ops(config.model, draw, backend="cuda", positions=min(config.chunk, 512), cp=cp), device)
    except Exception as error:
        return "failed", error
    torch.cuda.empty_cache()
    return "passed", None


class _OneOf(Local):
    """Operations of one process, with the share of the heads that one of ``cp`` ranks has."""

    cp = 1

    def share(self, size: int) -> int:
        return size // self.cp


def _cases(config: ModelConfig, draw: Draw, positions: int, rows: int, cp: int) -> list[Case]:
    """Return the cases of the head and of one layer of each kind, as one of ``cp`` ranks has them."""
    resolve_dims(config, HardwareConfig(name="self-check", ranks=cp, ep=1))
    model = build_model(config, device="meta")
    ops = model.ops
    context = _OneOf(ops.attention, ops.latent, ops.moe, ops.logits)
    context.cp = cp
    for layer in model.model.layers:
        mixer: Any = layer.mixer
        if not hasattr(mixer, "op_cases"):
            raise NotImplementedError(f"{config.architecture}: {type(mixer).__name__} has no op_cases to check")
    kinds: dict[type, Any] = {}
    for module in model.modules():
        if hasattr(module, "op_cases"):
            module.ops = ops._replace(context=context)  # type: ignore[assignment]
            kinds.setdefault(type(module), module)
    return [
        _logits(config.hidden_size, min(-(-config.vocab_size // cp), VOCABULARY), draw, positions),
        *(c for kind in kinds.values() for c in kind.op_cases(draw, positions, rows)),
    ]


def _logits(width: int, vocabulary: int, draw: Draw, positions: int) -> Case:
    inputs = {"hidden": draw(positions, width), "weight": draw(vocabulary, width, scale=2 * width**-0.5)}
    targets = torch.randint(vocabulary, (positions,), generator=draw.generator, device=draw.device)

    def run(ops: Ops, tensors: Tensors) -> Tensors:
        def call(leaves: Tensors) -> Tensors:
            logit, lse, mean = ops.logits(leaves["hidden"], leaves["weight"], targets)
            return {"logit": logit, "log-sum-exp": lse, "mean logit": mean}

        return differentiated(tensors, ("hidden", "weight"), call)

    return "log-probabilities", inputs, run


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _distance(value: Tensor, target: Tensor) -> float:
    if value.shape != target.shape:
        return math.inf
    if target.dtype == torch.bool:  # scores that tie but for rounding may be chosen in either order
        return float((value != target).sum()) / (2 * max(int(target.sum()), 1))
    value, target = _widened(value.detach()), _widened(target.detach())
    return float((value - target).norm()) / (float(target.norm()) or 1.0)


def _place(device: torch.device) -> str:
    try:
        import importlib.metadata

        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return f"{name}, torch {torch.__version__}, triton {triton}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the arguments ask for, print a table, return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        print("Keys and their defaults: " + " ".join(f"{f.name}={f.default}" for f in fields(Settings)))
        return 0
    try:
        settings = parse_settings(Settings, arguments)
        config = load_model_config(settings.model)
        device = torch.device(settings.device)
        draw = Draw(device, getattr(torch, settings.dtype or config.dtype), settings.seed)
        sizes = {"positions": settings.positions, "rows": settings.rows, "cp": settings.cp}
        findings = check_ops(config, draw, backend=settings.backend, **sizes)
    except ValueError as error:
        print(f"longstraw.selfcheck: {error}", file=sys.stderr)
        return 2
    table = Table(title=f"{config.name}, backend {settings.backend}: {_place(device)}")
    for column in ("operation", "tensor", "off by", "bar", "verdict"):
        table.add_column(column, justify="right" if column in ("off by", "bar") else "left")
    for x in findings:
        verdict = "[green]pass[/green]" if x.passed else "[bold red]FAIL[/bold red]"
        table.add_row(x.op, x.tensor, f"{x.distance:.1e}", f"{x.bar:.0e}", verdict)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
    failed = sorted({x.op for x in findings if not x.passed})
    print(f"selfcheck: {'FAILED: ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
