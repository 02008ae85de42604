"""Every fused operation against its reference, on the very card: ``python -m longstraw.selfcheck [key=value ...]``.

A compiler may make a wrong kernel of right source; only the card can tell. Inputs are drawn at a model's own widths, in
its dtype; each operation of the backend runs forward and backward, the reference the same in at least float32 on the
same device, and results and all gradients are compared by relative L2. A CUDA job does this before anything else.

The exit status is 0 if all passed, 1 if not, 2 if the arguments mean nothing. T positions, P retained ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longstraw.config import DTYPES, ConfigError, ModelConfig, RunConfig, at_least, choose, load_model_config
from longstraw.config.architectures import Glm52Config, Qwen36Config
from longstraw.config.settings import parse_settings
from longstraw.ops import BACKENDS, Ops, choose_ops
from longstraw.ops.attention import attend
from longstraw.ops.latent import attend_rows

# Far above what rounding gives (1e-6 and 6e-3; float32 products on tensor cores 1e-3), far below what an error gives.
BARS = {torch.float64: 1e-9, torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
VOCABULARY = 32_768  # rows of the head that are checked at most: further ones are more of the same tiles

Tensors = dict[str, Tensor]


class SelfCheckError(RuntimeError):
    """An operation is not what its reference is, on this device."""


@dataclass(frozen=True)
class Settings:
    """What is checked; the fields are the keys of the command line."""

    model: str = "qwen3_6_27b"  # a name in conf/model
    backend: str = "cuda"
    device: str = "cuda"
    dtype: str | None = None  # None: the model's
    positions: int = 512  # T
    rows: int = 4096  # P
    seed: int = 0

    def __post_init__(self) -> None:
        choose("backend", self.backend, BACKENDS)
        choose("device", self.device.partition(":")[0], ("cpu", "cuda"))
        if self.dtype is not None:
            choose("dtype", self.dtype, DTYPES)
        at_least("positions", self.positions, 1)
        at_least("rows", self.rows, 1)
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


class _Draw:
    """Draws normal numbers, the same ones for the fused run and for the reference."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, wide: bool = False) -> Tensor:
        inner = torch.promote_types(self.dtype, torch.float32)
        drawn = torch.randn(shape, generator=self.generator, device=self.device, dtype=inner).mul_(scale)
        return drawn if wide else drawn.to(self.dtype)


Case = tuple[str, Tensors, Callable[[Ops, Tensors], Tensors]]  # name, inputs, what an implementation makes of them


def check_ops(
    config: ModelConfig,
    *,
    backend: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    positions: int = 512,
    rows: int = 4096,
    seed: int = 0,
) -> list[Finding]:
    """Compare each operation that ``config``'s layers call with its reference; return what was found, worst first."""
    dtype = dtype or getattr(torch, config.dtype)
    fused, reference = choose_ops(backend), choose_ops("reference")
    findings = []
    for name, inputs, run in _cases(config, _Draw(device, dtype, seed), positions, rows):
        values = run(fused, inputs)
        targets = run(reference, {key: _widened(x) for key, x in inputs.items()})
        findings += [Finding(name, key, _distance(x, targets[key]), BARS[dtype]) for key, x in values.items()]
    return sorted(findings, key=lambda x: -x.distance if x.distance == x.distance else -math.inf)


def require(findings: Sequence[Finding], device: torch.device) -> None:
    """Raise ``SelfCheckError`` that names every tensor beyond its bar, the device and the versions."""
    failed = [x for x in findings if not x.passed]
    if failed:
        what = "; ".join(f"{x.op}: {x.tensor} is off by {x.distance:.1e} (bar {x.bar:.0e})" for x in failed)
        raise SelfCheckError(f"self-check failed on {_place(device)}: {what}. selfcheck=off trains all the same")


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
        require(check_ops(config.model, backend="cuda", device=device, positions=min(config.chunk, 512)), device)
    except Exception as error:
        return "failed", error
    torch.cuda.empty_cache()
    return "passed", None


def _cases(config: ModelConfig, draw: _Draw, positions: int, rows: int) -> list[Case]:
    cases = [_logits(config, draw, positions)]
    if isinstance(config, Qwen36Config):
        cases += [_attention(config, draw, positions, rows), _delta(config, draw, positions)]
        cases.append(_convolution(config, draw, positions))
    if isinstance(config, Glm52Config):
        cases += [_latent(config, draw, positions, rows), _choice(config, draw, positions, rows)]
    return cases


def _differentiated(inputs: Tensors, wanted: Sequence[str], call: Callable[[Tensors], Tensors]) -> Tensors:
    """Return the results of ``call`` and the gradients of the inputs ``wanted``, with drawn cotangents."""
    leaves = {key: x.detach().requires_grad_(key in wanted) for key, x in inputs.items()}
    results = call(leaves)
    cotangents = [_cotangent(x) for x in results.values()]
    gradients = torch.autograd.grad(
        list(results.values()), [leaves[key] for key in wanted], cotangents, materialize_grads=True
    )
    return results | {f"gradient of {key}": x for key, x in zip(wanted, gradients, strict=True)}


def _cotangent(like: Tensor) -> Tensor:
    """Return numbers that every dtype holds exactly."""
    return torch.arange(like.numel(), device=like.device).cos().bfloat16().to(like.dtype).view(like.shape)


def _attention(config: Qwen36Config, draw: _Draw, positions: int, rows: int) -> Case:
    heads, width = config.num_key_value_heads, config.head_dim
    inputs = {"q": draw(positions, config.num_attention_heads, width)}
    inputs |= {key: draw(positions, heads, width) for key in ("k", "v")}
    inputs |= {key: draw(rows, heads, width) for key in ("retained key", "retained value")}
    before = {key: draw(rows, heads, width, wide=True) for key in ("retained key", "retained value")}

    def run(ops: Ops, tensors: Tensors) -> Tensors:
        buffers = {key: x.clone() for key, x in before.items()}

        def call(leaves: Tensors) -> Tensors:
            past = (leaves["retained key"], leaves["retained value"])
            scale = width**-0.5
            new = (leaves["q"], leaves["k"], leaves["v"])
            return {"output": attend(*new, *past, *buffers.values(), scale=scale, parts=ops.attention)}

        results = _differentiated(tensors, ("q", "k", "v"), call)
        return results | {f"gradient of {key}": x - before[key] for key, x in buffers.items()}

    return "attention", inputs, run


def _delta(config: Qwen36Config, draw: _Draw, positions: int) -> Case:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    inputs = {name: draw(positions, keys, key) for name in ("q", "k")} | {"v": draw(positions, values, value)}
    inputs["decay"] = -0.05 * draw(positions, values, wide=True).sigmoid()  # slow: the first state reaches the end
    inputs["beta"] = draw(positions, values).sigmoid()
    inputs["state"] = draw(values, key, value, wide=True)

    def run(ops: Ops, tensors: Tensors) -> Tensors:
        return _differentiated(
            tensors,
            tuple(inputs),
            lambda leaves: dict(zip(("output", "final state"), ops.delta(*leaves.values()), strict=True)),
        )

    return "gated delta rule", inputs, run


def _convolution(config: Qwen36Config, draw: _Draw, positions: int) -> Case:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    channels = 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim
    taps = config.linear_conv_kernel_dim
    inputs = {"x": draw(positions, channels), "weight": draw(channels, taps), "tail": draw(taps - 1, channels)}

    def run(ops: Ops, tensors: Tensors) -> Tensors:
        return _differentiated(
            tensors,
            tuple(inputs),
            lambda leaves: dict(zip(("output", "new tail"), ops.conv(*leaves.values()), strict=True)),
        )

    return "causal convolution", inputs, run


def _logits(config: ModelConfig, draw: _Draw, positions: int) -> Case:
    vocabulary, width = min(config.vocab_size, VOCABULARY), config.hidden_size
    inputs = {"hidden": draw(positions, width), "weight": draw(vocabulary, width, scale=2 * width**-0.5)}
    targets = torch.randint(vocabulary, (positions,), generator=draw.generator, device=draw.device)

    def run(ops: Ops, tensors: Tensors) -> Tensors:
        def call(leaves: Tensors) -> Tensors:
            logit, lse, mean = ops.logits(leaves["hidden"], leaves["weight"], targets)
            return {"logit": logit, "log-sum-exp": lse, "mean logit": mean}

        return _differentiated(tensors, ("hidden", "weight"), call)

    return "log-probabilities", inputs, run


def _latent(config: Glm52Config, draw: _Draw, positions: int, rows: int) -> Case:
    width, rope = config.kv_lora_rank, config.qk_rope_head_dim
    count = min(config.index_topk, rows)
    inputs = {"q": draw(positions, config.num_attention_heads, width + rope)}
    inputs |= {"latent": draw(positions, width), "rotary key": draw(positions, rope)}
    inputs |= {"retained latent": draw(rows, width), "retained rotary key": draw(rows, rope)}
    before = {key: draw(rows, inputs[key].shape[1], wide=True) for key in ("retained latent", "retained rotary key")}
    order = torch.rand(positions, rows + 1, generator=draw.generator, device=draw.device).argsort(-1)
    chosen = order[:, :count].sort(-1).values.int()
    chosen[:, -1] = rows + torch.arange(positions, device=draw.device)  # a position sees itself
    scale = (config.qk_nope_head_dim + rope) ** -0.5

    def run(ops: Ops, tensors: Tensors) -> Tensors:
        buffers = [x.clone() for x in before.values()]

        def call(leaves: Tensors) -> Tensors:
            past = (leaves["retained latent"], leaves["retained rotary key"])
            new = (leaves["q"], leaves["latent"], leaves["rotary key"])
            return {"output": attend_rows(*new, chosen, past, (buffers[0], buffers[1]), scale=scale, ops=ops.latent)[0]}

        results = _differentiated(tensors, ("q", "latent", "rotary key"), call)
        return results | {f"gradient of {key}": x - before[key] for key, x in zip(before, buffers, strict=True)}

    return "attention to chosen rows", inputs, run


def _choice(config: Glm52Config, draw: _Draw, positions: int, rows: int) -> Case:
    heads, width = config.index_n_heads, config.index_head_dim
    inputs = {"q": draw(positions, heads, width), "retained key": draw(rows, width), "key": draw(positions, width)}
    inputs["weights"] = draw(positions, heads, wide=True)
    count = min(config.index_topk, rows)

    def run(ops: Ops, tensors: Tensors) -> Tensors:
        q, past, key, weights = tensors.values()
        chosen = ops.latent.select_rows(q, weights, past, key, count, scale=width**-0.5).long()
        marks = torch.zeros(positions, rows + positions + 1, dtype=torch.bool, device=q.device)
        return {"rows": marks.scatter_(1, chosen % marks.shape[1], True)[:, :-1]}  # the last column: none chosen

    return "choice of rows", inputs, run


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
    try:
        settings = parse_settings(Settings, sys.argv[1:] if arguments is None else arguments)
        config = load_model_config(settings.model)
        device = torch.device(settings.device)
        findings = check_ops(
            config,
            backend=settings.backend,
            device=device,
            dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
            positions=settings.positions,
            rows=settings.rows,
            seed=settings.seed,
        )
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
