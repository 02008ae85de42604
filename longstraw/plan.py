"""What fits where: ``python -m longstraw.plan [model=NAME] [hardware=NAME] [key=value] [--config-dir FOLDER]``.

A table of the largest context that fits for each way to train: prompt gradient, trained set, optimizer, dtype of the
state's gradient, and whether the retained rows lie on the GPU or in host pages. A key that is given holds in every row;
any key of a job may be; with ``model.checkpoint=FOLDER`` the sizes are its own. With ``context=...`` each row also
names the smallest hardware of that kind that holds it. Where ``hardware.rates`` are known a row has the hours that a
step takes and its GPU-hours, at that context or else at the largest: docs/time.md says what they are not. Steps after
the first are meant, in which AdamW has its state. Host memory counts where ``hardware.host_memory_gb`` says how much a
node has.

``mode=simulate`` counts one case at its own length. Here each way is counted at two short ones, with most blocks left
out, and follows the straight line through both: within 1.6 % of it. For Qwen3.6-27B that takes half a minute of
processor time for each way and each number of nodes, and a second when asked again: counts are kept in the user's
folder for caches.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from longstraw.config import ConfigError, RunConfig, option, with_checkpoint_sizes
from longstraw.config.overrides import overlay, typed_keys, with_users_options
from longstraw.config.settings import read_arguments
from longstraw.memory.fit import LONGEST, Fitting, count, largest_context, limit_bytes, ranks_text, smallest_hardware
from longstraw.timing.estimate import predicted_seconds
from longstraw.units import format_bytes, format_count

DEFAULTS = {"model": "qwen3_6_27b", "hardware": "h20x8", "adapter": "auto", "data": "needle"}
DEFAULTS |= {"algorithm": "grpo", "optimizer": "adamw"}
AXES: dict[str, tuple[Any, ...]] = {  # what a row chooses, where it is not given
    "prompt_grad": ("detached", "exact"),
    "adapter": ("lora", "none"),
    "optimizer": ("adamw", "none"),
    "state.gradient_dtype": ("float32", "bfloat16"),
    "state.device": (None, "cpu"),
}


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` arguments as a dict; raise ``ConfigError`` with one line for each that no job knows."""
    given = read_arguments(arguments)
    for key in ("sweep", "mode"):
        if key in given:
            raise ConfigError(f"{key}: a plan is of no {key}; it shows every way to train on one hardware")
    return typed_keys(given)


def compose(typed: dict[str, Any]) -> RunConfig:
    """Return the run that these keys describe, the other ones at their defaults."""
    base: dict[str, Any] = {group: option(group, name) for group, name in DEFAULTS.items()}
    return with_checkpoint_sizes(overlay({**base, "steps": 2}, typed))


def cases(typed: dict[str, Any]) -> Iterator[RunConfig]:
    """Yield every way to train that ``typed`` leaves open; a detached prompt's state has no gradient."""
    base = compose(typed)
    choices = [axis if key not in typed else (typed[key],) for key, axis in AXES.items()]
    for grad, adapter, optimizer, gradient_dtype, device in itertools.product(*choices):
        if grad == "exact" and base.refresh_every > 1 and "prompt_grad" not in typed:
            continue  # a stale prompt has no exact gradient
        if grad == "detached" and gradient_dtype == "bfloat16" and "state.gradient_dtype" not in typed:
            continue
        yield replace(
            base,
            prompt_grad=grad,
            adapter=replace(base.adapter, name=adapter),
            optimizer=replace(base.optimizer, name=optimizer),
            state=replace(base.state, gradient_dtype=gradient_dtype, device=device),
        )


def row(config: RunConfig, with_context: bool) -> list[str]:
    """Return the cells of one way to train."""
    fitting = largest_context(config)
    exact, state = config.prompt_grad == "exact", config.state
    cells = [
        config.prompt_grad,
        config.adapter.name,
        config.optimizer.name,
        f"{state.dtype or config.model.dtype}{f' / {state.gradient_dtype}' if exact else ''}",
        "host" if state.device == "cpu" else "GPU",
        *_found(fitting),
    ]
    if config.hardware.rates.known:
        cells.append(_hours(config if with_context or fitting is None else replace(config, context=fitting.context)))
    if with_context:
        smallest = smallest_hardware(config, from_one=True)
        cells.append("none" if smallest is None else ranks_text(smallest))
    return cells


def _hours(config: RunConfig) -> str:
    """Return the hours and GPU-hours of a step."""
    said = predicted_seconds(config)
    if said is None:
        return ""
    hours = sum(said.values()) / 3600
    return f"{hours:.2g} / {hours * config.hardware.world_size:.2g}"


def _found(fitting: Fitting | None) -> list[str]:
    if fitting is None:
        return ["none", "", "", ""]
    said = fitting.prediction
    kind, most = max(said.by_kind.items(), key=lambda part: part[1])
    return [
        f"{'' if fitting.context < LONGEST else '≥ '}{fitting.context:,}",
        said.verb,
        f"{kind} {most / said.peak:.0%}",
        format_bytes(said.host),
    ]


def table(typed: dict[str, Any], configs: Sequence[RunConfig]) -> Table:
    """Return the table of all ``configs``, which differ in what ``AXES`` names."""
    first, with_context = configs[0], "context" in typed
    hardware, limit = first.hardware, limit_bytes(first.hardware)
    if limit is None:
        raise ConfigError(f"hardware={hardware.name} has no memory_gb: give hardware.memory_gb=NUMBER")
    title = f"{first.model.name} on {ranks_text(hardware)}, {format_bytes(limit)} a device: largest contexts, predicted"
    count(configs, line=True)
    if with_context:
        count(configs)
    made = Table(title=title)
    heads = ["prompt_grad", "adapter", "optimizer", "state / gradient", "rows on"]
    heads += ["largest context", "peak in", "holds most", "host memory"]
    heads += ["hours / GPU-hours"] if hardware.rates.known else []
    for head in [*heads, *([f"holds {format_count(first.context)}"] if with_context else [])]:
        made.add_column(head, justify="right" if head in ("largest context", "host memory") else "left")
    for config in configs:
        made.add_row(*row(config, with_context))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table that the arguments ask for and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    try:
        typed = parse(with_users_options(arguments))
        configs = list(cases(typed))
        made = table(typed, configs)
    except (ValueError, OSError) as error:
        print(f"longstraw.plan: {error}", file=sys.stderr)
        return 2
    Console(width=None if sys.stdout.isatty() else 160).print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
