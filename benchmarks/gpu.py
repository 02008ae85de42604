"""On one GPU, in minutes: are the kernels right, how near their floors are they, and what would a rank of many take?

    python -m benchmarks.gpu [model=qwen3_6_27b] [ranks=8] [context=2Mi] [prompt_grad=detached] [device=cuda]
        [minutes=8] [out=FILE.json]

1. The model's kernels against their references (``longstraw.selfcheck``); a wrong one ends the script.
2. Copy bandwidth and matmul rate of this device, then each operation at the model's own widths: time, and the time that
   its bytes or its multiply-adds take at those two rates, whichever is longer: its floor.
3. One rank of ``ranks`` at ``context`` positions (``mode=emulate``): real rows, real weights of that rank, collectives
   that send nothing. First and last chunks and branches are evaluated; peak beside the simulation and the budget, and
   the time of all chunks, interpolated between the evaluated ones: a chunk's cost is affine in its start.

What stands after ``minutes`` is left out, and said. With ``device=cpu`` and a tiny model the script itself is tried.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longstraw.config import (
    AdapterConfig,
    ConfigError,
    HardwareConfig,
    NeedleConfig,
    RunConfig,
    choose,
    load_model_config,
)
from longstraw.config.architectures.base import ModelConfig
from longstraw.config.settings import parse_settings
from longstraw.layers.attention import Attention
from longstraw.layers.delta import GatedDeltaNet
from longstraw.layers.latent import Indexer, LatentAttention
from longstraw.layers.op_cases import Draw
from longstraw.models import build_model
from longstraw.ops import Ops, choose_ops
from longstraw.ops.attention import attend
from longstraw.ops.host_offload import RetainedRows
from longstraw.ops.latent import attend_rows
from longstraw.ops.logprob import token_logprobs
from longstraw.parallel.parallel_dims import resolve_dims
from longstraw.selfcheck import check_ops
from longstraw.simulation.emulate import emulate
from longstraw.simulation.simulate import simulate
from longstraw.training.monitor import Monitor, Progress
from longstraw.units import format_bytes

PAPER = {"step": 5198.8, "replay": 264.4}  # seconds at 2,097,152 positions on eight H20, arXiv 2607.14952
H20_FLOPS = 148e12  # bf16, dense


@dataclass(frozen=True)
class Settings:
    """The keys of the command line."""

    model: str = "qwen3_6_27b"
    ranks: int = 8
    context: int = 2**21
    prompt_grad: str = "detached"
    device: str = "cuda"
    minutes: int = 8
    out: str | None = None

    def __post_init__(self) -> None:
        choose("device", self.device, ("cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device=cuda: this machine has no GPU that PyTorch can use")


@dataclass(frozen=True)
class Timed:
    """One operation: seconds, and the floor that its bytes and multiply-adds set."""

    name: str
    seconds: float
    bytes: float
    flops: float


class Clock:
    """Times a call: the median of a few, after one that is not counted."""

    def __init__(self, device: torch.device, rounds: int = 5):
        self.device, self.rounds = device, rounds

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def __call__(self, call: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(self.rounds + 1):
            self.synchronize()
            begun = time.perf_counter()
            call()
            self.synchronize()
            seconds.append(time.perf_counter() - begun)
        return sorted(seconds[1:])[self.rounds // 2]


def rates(clock: Clock) -> tuple[float, float]:
    """Return what this device reaches: bytes a second read and written in a copy, operations a second in products."""
    small = clock.device.type == "cpu"
    x = torch.empty(2**24 if small else 2**29, dtype=torch.bfloat16, device=clock.device)
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / clock(lambda: y.copy_(x))
    side = 512 if small else 8192
    a = torch.randn(side, side, device=clock.device).to(torch.bfloat16)
    return copied, 2 * side**3 / clock(lambda: a @ a)


class Bench:
    """Times the operations of one layer on one of ``ranks``: ``chunk`` queries, ``rows`` retained rows here."""

    def __init__(self, clock: Clock, ops: Ops, ranks: int, rows: int, chunk: int):
        self.clock, self.ops, self.ranks, self.rows, self.chunk = clock, ops, ranks, rows, chunk

    def run(self, config: ModelConfig) -> Iterator[Timed]:
        """Yield every operation of ``config``'s layers, and of its head."""
        kinds = {type(module): module for module in build_model(config, device="meta").modules()}
        for layer in kinds.values():
            if isinstance(layer, Attention):
                yield from self.attention(layer)
            elif isinstance(layer, GatedDeltaNet):
                yield from self.delta(layer)
            elif isinstance(layer, LatentAttention):
                yield from self.chosen(layer)
            elif isinstance(layer, Indexer):
                yield from self.choice(layer)
        yield from self.head(config)

    def attention(self, layer: Attention) -> list[Timed]:
        heads, groups, width = layer.heads, layer.kv_heads, layer.head_dim
        past = self._draw(self.rows, groups, width), self._draw(self.rows, groups, width)
        sums = self._zeros(self.rows, groups, width), self._zeros(self.rows, groups, width)
        new = self._draw(self.chunk, heads, width), *(self._draw(self.chunk, groups, width) for _ in range(2))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, RetainedRows(past, sums), scale=width**-0.5, parts=self.ops.attention)

        flops = 4.0 * heads * width * self.chunk * (self.rows + self.chunk / 2)
        size = 2.0 * (2 * new[0].numel() + 2 * (self.rows + self.chunk) * groups * width)
        return self._both("attention", new, call, size, flops)

    def delta(self, layer: GatedDeltaNet) -> list[Timed]:
        keys, values = layer.key_heads // self.ranks, layer.value_heads // self.ranks
        key, value, taps = layer.key_dim, layer.value_dim, layer.taps
        scanned = (
            *(self._draw(self.chunk, keys, key) for _ in range(2)),
            self._draw(self.chunk, values, value),
            -self._draw(self.chunk, values, dtype=torch.float32).sigmoid(),
            self._draw(self.chunk, values).sigmoid(),
            self._draw(values, key, value, dtype=torch.float32),
        )
        size, flops = float(sum(x.nbytes for x in scanned) + scanned[2].nbytes), 8.0 * scanned[2].numel() * key
        timed = self._both("gated delta rule", scanned, lambda *x: self.ops.delta(*x)[0], size, flops)
        channels = 2 * keys * key + values * value
        mixed = self._draw(self.chunk, channels), self._draw(channels, taps), self._draw(taps - 1, channels)
        size, flops = 2.0 * mixed[0].nbytes, 2.0 * mixed[0].numel() * taps
        return timed + self._both("causal convolution", mixed, lambda *x: self.ops.conv(*x)[0], size, flops)

    def chosen(self, layer: LatentAttention) -> list[Timed]:
        config = layer.config
        latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
        count = max(min(config.index_topk, self.rows) // self.ranks, 1)  # of a query's rows, those of this rank
        past = self._draw(self.rows, latent), self._draw(self.rows, rope)
        sums = self._zeros(self.rows, latent), self._zeros(self.rows, rope)
        rows = torch.randint(self.rows, (self.chunk, count), device=self.clock.device).sort(-1).values.int()
        new = (
            self._draw(self.chunk, config.num_attention_heads, latent + rope),
            self._draw(self.chunk, latent),
            self._draw(self.chunk, rope),
        )

        def call(q: Tensor, row: Tensor, rotary: Tensor) -> Tensor:
            return attend_rows(q, (row, rotary), rows, RetainedRows(past, sums), scale=0.06, ops=self.ops.latent)[0]

        flops = 2.0 * config.num_attention_heads * (2 * latent + rope) * rows.numel()
        size = 2.0 * (2 * new[0].numel() + rows.numel() * (latent + rope))
        return self._both("attention to chosen rows", new, call, size, flops)

    def choice(self, layer: Indexer) -> list[Timed]:
        heads, width, count = layer.heads, layer.head_dim, min(layer.count, self.rows)
        queries = self._draw(self.chunk, heads, width), self._draw(self.chunk, heads, dtype=torch.float32)
        keys = self._draw(self.rows, width), self._draw(self.chunk, width)
        seconds = self.clock(lambda: self.ops.latent.select_rows(*queries, *keys, count, scale=width**-0.5))
        size = float(sum(x.nbytes for x in (*queries, *keys))) + 8.0 * self.chunk * count
        return [Timed("choice of rows", seconds, size, 2.0 * heads * width * self.chunk * self.rows)]

    def head(self, config: ModelConfig) -> list[Timed]:
        vocabulary, count = -(-config.vocab_size // self.ranks), min(self.chunk, 8192)
        tensors = self._draw(count, config.hidden_size), self._draw(vocabulary, config.hidden_size)
        targets = torch.randint(vocabulary, (count,), device=self.clock.device)
        size, flops = float(sum(x.nbytes for x in tensors)), 2.0 * count * tensors[1].numel()

        def call(hidden: Tensor, weight: Tensor) -> Tensor:
            return token_logprobs(hidden, weight, targets, logits=self.ops.logits)[0]

        return self._both("log-probabilities", tensors, call, size, flops)

    def _both(
        self, name: str, inputs: Sequence[Tensor], call: Callable[..., Tensor], size: float, flops: float
    ) -> list[Timed]:
        leaves = [x.requires_grad_() for x in inputs]
        with torch.no_grad():
            forward = self.clock(lambda: call(*leaves))
        out = call(*leaves)
        grad = torch.ones_like(out)
        backward = self.clock(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True, allow_unused=True))
        return [Timed(name, forward, size, flops), Timed(f"{name}, backward", backward, 2 * size, 2.5 * flops)]

    def _draw(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.clock.device).to(dtype)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.clock.device)


class PieceClock(Monitor):
    """Notes the seconds of each chunk and branch, by verb, with the positions done before it and its own.

    The last one that was made is ``latest``: who emulates makes it.
    """

    latest: PieceClock | None = None

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.pieces: dict[str, list[tuple[int, int, float]]] = {}
        PieceClock.latest = self

    @contextmanager
    def verb(self, name: str, positions: int) -> Iterator[None]:
        self._name, self._done = name, 0
        self.pieces[name] = []
        self._begun = self._now()
        with super().verb(name, positions):
            yield
        self.pieces[name] = self.pieces[name] or [(0, 0, self._now() - self._begun)]  # the optimizer's step is one

    def advance(self, positions: int) -> None:
        super().advance(positions)
        now = self._now()
        self.pieces[self._name].append((self._done, positions, now - self._begun))
        self._done, self._begun = self._done + positions, now

    def _now(self) -> float:
        self.peaks.synchronize()
        return time.perf_counter()


def interpolated(pieces: Sequence[tuple[int, int, float]]) -> float:
    """Return the seconds of all pieces, in either order, from those that were evaluated: the first and last two.

    The line goes through the full ones that are furthest apart, without the very first, which warms up.
    """
    if len(pieces) < 5:
        return sum(seconds for *_, seconds in pieces)
    full = max(count for _, count, _ in pieces)
    evaluated = [pieces[i] for i in (1, len(pieces) - 2, len(pieces) - 1) if pieces[i][1] == full]
    (first, _, low), (last, _, high) = evaluated[0], evaluated[-1]
    slope = (high - low) / ((last - first) or 1)
    return sum((low + slope * (start - first)) * count / full for start, count, _ in pieces)


def emulated(settings: Settings) -> dict[str, Any]:
    """Emulate a step of one rank; return its peaks and times beside what was said beforehand."""
    model = load_model_config(settings.model)
    lora = AdapterConfig(name=model.default_adapter)
    nodes = max(settings.ranks // 8, 1) if settings.device == "cuda" else 1
    gpus = settings.ranks // nodes if settings.device == "cuda" else 0
    hardware = HardwareConfig(
        name="played", backend=settings.device, nodes=nodes, gpus_per_node=gpus, ranks=settings.ranks
    )
    config = RunConfig(
        model=model,
        hardware=hardware,
        adapter=lora,
        data=NeedleConfig(),
        context=settings.context,
        response_length=min(model.response_length, settings.context // 4),
        chunk=model.chunk,
        prompt_grad=settings.prompt_grad,
        mode="emulate",
    )
    resolve_dims(config.model, config.hardware)  # refused before anything is made
    (row,) = emulate(config, Progress(None), PieceClock)
    (said,) = simulate(config)
    assert PieceClock.latest is not None
    seconds = {verb: interpolated(pieces) for verb, pieces in PieceClock.latest.pieces.items()}
    return {
        "peak_allocated_bytes": row["peak_allocated_bytes"],
        "simulated_bytes": said["peak_allocated_bytes"],
        "predicted_bytes": row["predicted_peak_bytes"],
        "measured_by": row["measured_by"],
        "seconds_by_verb": seconds,
        "seconds_a_replay": seconds.get("replay", 0.0) / config.group_size,
    }


def report(console: Console, timed: Sequence[Timed], copied: float, multiplied: float) -> None:
    """Print each operation beside its floor."""
    table = Table(title=f"{copied / 1e9:,.0f} GB/s copied, {multiplied / 1e9:,.0f} GFLOP/s in products")
    for column in ("operation", "time", "floor", "floor / time", "GFLOP/s"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for x in timed:
        floor = max(x.bytes / copied, x.flops / multiplied)
        cells = (f"{1e3 * x.seconds:.3f} ms", f"{1e3 * floor:.3f} ms", f"{floor / x.seconds:.0%}")
        table.add_row(x.name, *cells, f"{x.flops / x.seconds / 1e9:,.0f}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time and emulate what the arguments ask for; return the exit status."""
    begun = time.monotonic()
    try:
        settings = parse_settings(Settings, sys.argv[1:] if arguments is None else arguments, least=1)
        config = load_model_config(settings.model)
    except ValueError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    device, console = torch.device(settings.device), Console()
    console = console if console.is_terminal else Console(width=120)
    backend = settings.device
    findings = check_ops(config, Draw(device, getattr(torch, config.dtype), 0), backend=backend)
    wrong = sorted({f"{x.op}: {x.tensor} off by {x.distance:.1e}" for x in findings if not x.passed})
    console.print(f"selfcheck of {config.name}: {'FAILED' if wrong else f'{len(findings)} tensors right'}", *wrong)
    if wrong:
        return 1
    clock = Clock(device)
    copied, multiplied = rates(clock)
    rows = max(settings.context // settings.ranks, 1)
    timed = list(Bench(clock, choose_ops(backend), settings.ranks, rows, config.chunk).run(config))
    report(console, timed, copied, multiplied)
    result: dict[str, Any] = {"settings": asdict(settings), "copied": copied, "multiplied": multiplied}
    result["operations"] = [asdict(x) for x in timed]
    spent = (time.monotonic() - begun) / 60
    if spent < settings.minutes / 2:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        result["rank"] = emulated(settings)
        console.print(shown(result["rank"], settings, multiplied))
    else:
        console.print(f"no rank is emulated: {spent:.1f} of {settings.minutes} minutes are gone")
    if settings.out:
        Path(settings.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def shown(rank: dict[str, Any], settings: Settings, multiplied: float) -> str:
    """Return what one rank takes, in words."""
    peak, said = rank["peak_allocated_bytes"], rank["simulated_bytes"]
    verbs = ", ".join(f"{verb} {seconds:.1f} s" for verb, seconds in rank["seconds_by_verb"].items())
    where = f"{settings.context:,} positions, {settings.prompt_grad}"
    lines = [
        f"one rank of {settings.ranks} at {where}, without communication:",
        f"  peak {format_bytes(peak)} ({rank['measured_by']}), simulated {format_bytes(said)}: {peak / said:.4f}",
        f"  {verbs}",
    ]
    if settings.model == "qwen3_6_27b" and settings.device == "cuda":
        scale = multiplied / H20_FLOPS
        total, replay = sum(rank["seconds_by_verb"].values()) * scale, rank["seconds_a_replay"] * scale
        lines.append(
            f"  scaled by the matmul rate to an H20: step {total:.0f} s (paper {PAPER['step']:.0f} s), a replay "
            f"{replay:.0f} s (paper {PAPER['replay']:.0f} s)"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
