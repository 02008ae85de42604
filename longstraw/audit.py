"""Compare the step's gradients with whole-sequence autograd: ``python -m longstraw.audit [key=value ...]``.

A group of random responses to a random prompt is differentiated twice: by the step, which evaluates the prompt in
chunks and keeps its state, and as whole sequences in one autograd graph each. Both must agree in every ``prompt_grad``:

    exact      with the whole sequence
    window     with the whole sequence of which all before the window is a constant
    detached   with the whole sequence of which the whole prompt but its last token is a constant

and the last column of the table shows how much of the gradient ``detached`` leaves out. The exit status is 0 if all
passed, 1 if not, 2 for invalid arguments.

P prompt positions, R response positions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from longstraw.config import (
    DTYPES,
    INNER_CHUNK,
    AdapterConfig,
    AlgorithmConfig,
    ConfigError,
    at_least,
    choose,
    gradient_start,
)
from longstraw.config.settings import parse_settings
from longstraw.group import Group
from longstraw.grpo import BranchTerms, advantages, branch_loss, denominators
from longstraw.models import build_model, load_model
from longstraw.models.decoder import Decoder
from longstraw.state import Past
from longstraw.step import grpo_step

MODES = ("exact", "window", "detached")
ALGORITHM = AlgorithmConfig()
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that rounding explains: relative L2 of a parameter's gradient, and log-probabilities."""

    gradient: float
    logprob: float


# Far above what is seen (1e-14, 5e-6 and 1e-2), far below what an error makes (0.1 to 1). In bfloat16 each chunk adds
# its gradient to a rounded sum, and a router may choose another expert.
TOLERANCES = {
    "float64": Tolerance(1e-9, 1e-9),
    "float32": Tolerance(1e-3, 1e-4),
    "bfloat16": Tolerance(0.2, 0.2),
}


@dataclass(frozen=True)
class Settings:
    """What is audited; the fields are the keys of the command line."""

    model: str = "qwen3_6_tiny"  # a name in conf/model, with random weights
    checkpoint: str | None = None  # a folder in transformers' format, instead
    layers: int | None = None  # its first so many layers; None: all
    prompt: int = 257
    response: int = 33  # of the longest response
    chunk: int = 64
    window: int = 100
    group_size: int = 3
    dtype: str = "float64"
    adapter: str = "none"
    device: str = "cpu"
    backend: str | None = None  # of the ops; None: the device's default
    seed: int = 0

    def __post_init__(self) -> None:
        choose("dtype", self.dtype, DTYPES)
        choose("adapter", self.adapter, ("none", "lora"))
        for key, least in (("prompt", 2), ("response", 1), ("group_size", 2), ("layers", 1), ("window", 1)):
            at_least(key, getattr(self, key), least)
        if self.chunk < INNER_CHUNK or self.chunk % INNER_CHUNK:
            raise ConfigError(f"chunk={self.chunk} must be a multiple of {INNER_CHUNK}")
        choose("device", self.device.partition(":")[0], ("cpu", "cuda"))
        if self.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"device={self.device}: this machine has no GPU that PyTorch can use")


@dataclass(frozen=True)
class Run:
    """One differentiation of the group's loss; gradients lie on the host."""

    loss: float
    logprobs: list[Tensor]  # [R] each
    gradients: Gradients


@dataclass(frozen=True)
class Finding:
    """How a mode compares with its whole sequences."""

    mode: str
    loss: float  # absolute difference
    logprob: float  # largest absolute difference
    gradient: float  # largest relative L2 of a parameter
    worst: str  # that parameter
    recomputed: float | None  # largest difference of state that was evaluated again
    tolerance: Tolerance

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        same = self.logprob <= self.tolerance.logprob and self.loss <= self.tolerance.logprob
        return same and self.gradient <= self.tolerance.gradient


def build(settings: Settings) -> Decoder:
    """Return the model to audit. An adapter's B, zero in a new one, is drawn so that every parameter matters."""
    cut = {} if settings.layers is None else {"num_hidden_layers": settings.layers}
    make: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "backend": settings.backend, **cut}
    if settings.checkpoint is None:
        model = build_model(settings.model, seed=settings.seed, **make)
    else:
        model = load_model(settings.checkpoint, **make)
    if settings.adapter != "none":
        from longstraw.models.lora import add_adapter

        add_adapter(model, AdapterConfig(name=settings.adapter), seed=settings.seed)
        generator = torch.Generator().manual_seed(settings.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def make_group(model: Decoder, settings: Settings) -> Group:
    """Return random tokens with ragged responses; the old policy is a little off, or the loss would be 0 whatever."""
    generator = torch.Generator().manual_seed(settings.seed)

    def draw(count: int) -> Tensor:
        return torch.randint(model.config.vocab_size, (count,), generator=generator)

    lengths = [max(settings.response - 7 * i, 1) for i in range(settings.group_size)]
    rewards = [float(i % 2) + 0.1 * i for i in range(settings.group_size)]
    group = Group(draw(settings.prompt), [draw(length) for length in lengths], rewards)
    group = group.to(model.lm_head.weight.device)
    with torch.no_grad():
        own = [_whole_logprobs(model, group, response, 0).cpu() for response in group.responses]
    return replace(group, old_logprobs=[lp + 0.1 * torch.randn(lp.shape, generator=generator) for lp in own])


def whole(model: Decoder, group: Group, first: int) -> Run:
    """Differentiate whole sequences, one graph a response, with the positions before ``first`` as constants."""
    losses, logprobs = [], []
    assert group.old_logprobs is not None
    weights = zip(
        group.responses,
        group.old_logprobs,
        advantages(group.rewards),
        denominators(group, ALGORITHM, 1),
        strict=True,
    )
    for response, old, advantage, denominator in weights:
        lp = _whole_logprobs(model, group, response, first)
        branch = branch_loss(
            lp, BranchTerms(advantage=advantage, denominator=denominator, old_logprobs=old.to(lp.device)), ALGORITHM
        )
        branch.loss.backward()
        losses.append(float(branch.loss.detach()))
        logprobs.append(lp.detach().cpu())
    return Run(sum(losses), logprobs, _taken(model))


def _whole_logprobs(model: Decoder, group: Group, response: Tensor, first: int) -> Tensor:
    """Return the response's log-probabilities [R] without the step's verbs and its retained state."""
    past = [state.leaves(0, grad=False) for state in model.new_states(0)]
    if first:
        with torch.no_grad():
            past = [Past(first, update) for update in model(group.prompt[:first], past)[1]]
    response = response.to(group.prompt.device)
    hidden, _ = model(torch.cat([group.prompt[first:], response[:-1]]), past)
    logprobs, _ = model.logprobs(hidden[len(group.prompt) - 1 - first :], response)
    return logprobs


def stepped(model: Decoder, group: Group, settings: Settings, mode: str) -> tuple[Run, float | None]:
    """Differentiate by the step; return that and the largest difference of state that was evaluated again."""
    result = grpo_step(
        model,
        group,
        chunk=settings.chunk,
        prompt_grad="detached" if mode == "detached" else "exact",
        prompt_grad_window=settings.window if mode == "window" else None,
        algorithm=ALGORITHM,
    )
    return Run(float(result.loss), result.logprobs, _taken(model)), result.recompute_difference


def _taken(model: nn.Module) -> Gradients:
    """Move the gradients to the host."""
    taken = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def relative(ours: Gradients, theirs: Gradients) -> dict[str, float]:
    """Return the relative L2 difference by parameter.

    What is far below rounding of the whole gradient counts as that: a gradient that is zero but for rounding has no
    digits to compare. A gradient that only one side has counts as infinitely off.
    """
    total = _norm(theirs.values())
    differences = {}
    for name in ours.keys() | theirs.keys():
        if name not in ours or name not in theirs:
            differences[name] = float("inf")
            continue
        floor = torch.finfo(theirs[name].dtype).eps * total
        scale = max(float(theirs[name].double().norm()), floor)
        differences[name] = float((ours[name].double() - theirs[name].double()).norm()) / scale if scale else 0.0
    return differences


def _norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def compare(mode: str, ours: Run, theirs: Run, recomputed: float | None, tolerance: Tolerance) -> Finding:
    """Return how far a step is from its whole sequences."""
    differences = relative(ours.gradients, theirs.gradients)
    worst = max(differences, key=lambda name: _nan_first(differences[name]))
    pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
    logprob = max((float((a - b).abs().max()) for a, b in pairs), key=_nan_first)
    return Finding(mode, abs(ours.loss - theirs.loss), logprob, differences[worst], worst, recomputed, tolerance)


def _nan_first(value: float) -> float:
    return float("inf") if value != value else value


def audit(model: Decoder, settings: Settings) -> tuple[list[Finding], list[tuple[str, ...]]]:
    """Return a finding a mode, and the gradients by parameter group as rows of ``group_rows``."""
    group = make_group(model, settings)
    tolerance = TOLERANCES[settings.dtype]
    findings, runs = [], {}
    reference = whole(model, group, 0)
    for mode in MODES:
        ours, recomputed = stepped(model, group, settings, mode)
        window = settings.window if mode == "window" else None
        first = gradient_start(settings.prompt - 1, settings.chunk, "exact" if window else mode, window)
        first = settings.prompt - 1 if first is None else first
        theirs = reference if first == 0 else whole(model, group, first)
        findings.append(compare(mode, ours, theirs, recomputed, tolerance))
        runs[mode] = ours.gradients, theirs.gradients
    return findings, group_rows(runs, reference.gradients)


def group_rows(runs: dict[str, tuple[Gradients, Gradients]], reference: Gradients) -> list[tuple[str, ...]]:
    """Return a row a kind of parameter: name, count, relative L2 a mode (exact: cosine too), detached's from exact."""
    groups: dict[str, list[str]] = {}
    for name in reference:
        groups.setdefault(_group_of(name), []).append(name)
    groups["all"] = list(reference)
    rows = []
    for label, names in groups.items():
        row = [label, f"{sum(reference[name].numel() for name in names):,}"]
        for mode, (ours, theirs) in runs.items():
            a, b = _flat(ours, reference, names), _flat(theirs, reference, names)
            row.append(f"{_ratio((a - b).norm(), b.norm()):.1e}")
            row += [f"{_cosine(a, b):.6f}"] if mode == "exact" else []
        a, b = _flat(runs["detached"][0], reference, names), _flat(reference, reference, names)
        rows.append((*row, f"{_ratio((a - b).norm(), b.norm()):.1%}"))
    return rows


def _flat(gradients: Gradients, like: Gradients, names: list[str]) -> Tensor:
    return torch.cat([gradients.get(name, torch.zeros_like(like[name])).double().flatten() for name in names])


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if float(whole) else float(part)


def _cosine(a: Tensor, b: Tensor) -> float:
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else float(a.norm() == b.norm())


def _group_of(name: str) -> str:
    """Return the kind of a parameter: its place in a layer, whatever the layer."""
    parts = name.replace(".base_layer", "").split(".")
    if "layers" not in parts:
        return parts[-2]
    kind = parts[3]
    return "layer norms" if kind.endswith("layernorm") else kind


def _short(name: str) -> str:
    return name.removeprefix("model.").removesuffix(".weight").removesuffix(".default").replace(".base_layer", "")


def show(settings: Settings, model: Decoder, findings: list[Finding], rows: list[tuple[str, ...]]) -> None:
    """Print both tables and the verdict."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a log file has no width
    tolerance = findings[0].tolerance
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    console.print(
        f"{model.config.name}, {model.config.num_hidden_layers} layers, {settings.dtype} on {settings.device}: "
        f"prompt {settings.prompt}, {settings.group_size} responses of up to {settings.response}, chunk "
        f"{settings.chunk}, window {settings.window}, adapter {settings.adapter}, {trained} tensors trained"
    )
    table = Table(title="the step against whole sequences under autograd: largest differences")
    for column in ("prompt_grad", "loss", "log-probability", "gradient, relative L2", "of", "state again", "verdict"):
        table.add_column(column, justify="left" if column in ("prompt_grad", "of", "verdict") else "right")
    for f in findings:
        again = "-" if f.recomputed is None else f"{f.recomputed:.1e}"
        verdict = "[green]pass[/green]" if f.passed else "[bold red]FAIL[/bold red]"
        table.add_row(f.mode, f"{f.loss:.1e}", f"{f.logprob:.1e}", f"{f.gradient:.1e}", _short(f.worst), again, verdict)
    allowed = f"{tolerance.logprob:.0e}"
    table.add_row("allowed", allowed, allowed, f"{tolerance.gradient:.0e}", "", "", "", style="dim")
    console.print(table)
    table = Table(
        title="gradients by kind of parameter: relative L2 from those of the same whole sequences, cosine to them"
    )
    for column in ("kind", "parameters", "exact", "cosine", "window", "detached", "left out by detached"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("left out by detached: the relative L2 by which it differs from the whole sequence's gradient")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the audit that the arguments ask for and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        keys = "\n".join(f"    {f.name}={'' if f.default is None else f.default}" for f in fields(Settings))
        print(f"{__doc__}\nThe keys and their defaults:\n\n{keys}")
        return 0
    try:
        settings = parse_settings(Settings, arguments)
        model = build(settings)
    except (ValueError, OSError) as error:
        print(f"longstraw.audit: {error}", file=sys.stderr)
        return 2
    findings, rows = audit(model, settings)
    show(settings, model, findings, rows)
    failed = [finding.mode for finding in findings if not finding.passed]
    print(f"audit: {'FAILED: ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
