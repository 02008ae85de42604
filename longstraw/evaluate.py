"""Measure success on held-out prompts: ``python -m longstraw.evaluate [checkpoint=FOLDER] [key=value ...]``.

    python -m longstraw.evaluate model=llama_tiny data=lookup context=1Ki response_length=8     an untrained model
    python -m longstraw.evaluate checkpoint=RUN/checkpoints/step-00000020                       what a run had trained
    python -m longstraw.evaluate checkpoint=RUN/adapter evaluate.contexts=[1Ki,4Ki]             what it saved at its end
    python -m longstraw.evaluate checkpoint=FOLDER data=chain context=4Ki response_length=16    a model or an adapter

``checkpoint`` is a checkpoint of a run, a model in transformers' format, or an adapter in PEFT's with its base as
``model=`` or ``model.checkpoint=``. In a run's folder the run's own keys are the defaults. All keys of a job are known:

    data=lookup                 lookup, chain, count or multi, and their own keys; or your prompts and reward:
                                data=jsonl evaluate.path=FILE reward=package.module:function
    context=4Ki                 prompt and longest response; evaluate.contexts=[1Ki,4Ki]: prompts of several lengths
    response_length=16          tokens drawn at most; stop=[ids] ends a response
    evaluate.examples=64        held-out prompts at each length: each is evaluated once, one response drawn on it
    evaluate.temperature=0      0: the likeliest token
    hardware=cpu                cpu, cuda, or a file of your own; one process
    --config-dir FOLDER         your own option files, as for longstraw.run
    out=FOLDER                  where the row is appended to evaluations.jsonl; default: a new folder in runs/evaluate

Prints success with its 95 % interval: of all prompts, and by length, depth of the evidence and difficulty.
The exit status is 0, or 2 for invalid arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longstraw.config import ConfigError, RunConfig, from_dict, option, read_model_config, to_dict
from longstraw.config.overrides import overlay, typed_keys, with_users_options
from longstraw.config.settings import read_arguments
from longstraw.data import held_out_configs
from longstraw.data.reward import RewardError
from longstraw.launch.inputs import check_inputs
from longstraw.launch.spec import SPEC, new_run_id
from longstraw.memory.meter import MemoryMeter
from longstraw.models.decoder import Decoder
from longstraw.rollout.evaluation import held_out
from longstraw.run import new_folder
from longstraw.tracking.recorder import write_evaluation
from longstraw.tracking.run_folder import read_json
from longstraw.training.checkpoint import STATE, Checkpoints, read_state
from longstraw.training.evaluation import evaluate
from longstraw.training.model import configured_model
from longstraw.training.monitor import Monitor, Progress

DEFAULTS = {"model": "qwen3_6_27b", "hardware": "cpu", "adapter": "auto", "data": "lookup"}
DEFAULTS |= {"algorithm": "grpo", "optimizer": "adamw"}
SHOWN, SHOWN_PROMPT = 3, 60  # responses that are printed, and the last characters of their prompts


def configure(arguments: Sequence[str]) -> tuple[RunConfig, Path | None, Path | None]:
    """Return the run to evaluate, and the folders ``checkpoint`` and ``out``; raise ``ConfigError`` or ``OSError``."""
    given = read_arguments(with_users_options(arguments))
    checkpoint, out = (_folder(given.pop(key, None)) for key in ("checkpoint", "out"))
    base = base_of(checkpoint)
    typed = typed_keys(given, base)
    if typed.get("model.checkpoint") is not None:
        base = _with_model(base, str(typed["model.checkpoint"]))
    if not {"context", "evaluate.contexts"} & set(typed) and "context" not in base:
        raise ConfigError("give the length of prompt and response: context=4Ki, or evaluate.contexts=[1Ki,4Ki]")
    config = from_dict({**overlay(base, typed), "mode": "run"})
    if config.hardware.world_size > 1:
        raise ConfigError(
            f"hardware={config.hardware.name}: an evaluation runs in one process so far; hardware=cpu, or cuda"
        )
    check_inputs(config)
    held_out_configs(config)
    return config, checkpoint, out


def _folder(value: Any) -> Path | None:
    return None if value is None else Path(str(value)).expanduser()


def base_of(checkpoint: Path | None) -> dict[str, Any]:
    """Return the run, as nested dicts, that a checkpoint is evaluated as where keys do not say otherwise."""
    if checkpoint is None:
        return {**{group: option(group, name) for group, name in DEFAULTS.items()}, "rollout": "sample"}
    if (checkpoint / STATE).is_file():
        return dict(read_state(checkpoint).get("config") or base_of(None))
    if (checkpoint / SPEC).is_file():
        held = [str(path) for name in ("checkpoints/step-*", "model", "adapter") for path in checkpoint.glob(name)]
        raise ConfigError(
            f"checkpoint={checkpoint}: a run's folder; give {' or '.join(held) or 'one that has checkpoints'}"
        )
    run = read_json(checkpoint.parent / SPEC).get("config")
    base = base_of(None) if run is None else dict(run)
    if (checkpoint / "adapter_config.json").is_file():
        return overlay(base, {"adapter": "lora", "adapter.checkpoint": str(checkpoint)})
    return overlay(_with_model(base, str(checkpoint), run is not None), {"adapter": "none"})


def _with_model(base: Mapping[str, Any], checkpoint: str, same: bool = False) -> dict[str, Any]:
    """Return ``base`` with the model in ``checkpoint``; with ``same`` it keeps what a file of weights does not say."""
    kept = {key: base["model"][key] for key in ("dtype", "rope_angles", "chunk", "response_length") if same}
    return {**base, "model": to_dict(read_model_config(checkpoint, **kept))}


def load(config: RunConfig, checkpoint: Path | None) -> tuple[Decoder, int | None]:
    """Return the model to evaluate and the optimizer steps it has taken, None where that is not known."""
    model, _ = configured_model(config)
    if checkpoint is None:
        return model, 0
    if not (checkpoint / STATE).is_file():
        return model, None
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    Checkpoints(checkpoint.parent, trained, None).restore(checkpoint)
    return model, int(read_state(checkpoint)["step"])


class Shown(Progress):
    """Show on a terminal how many prompts are done."""

    def __init__(self) -> None:
        super().__init__(None)

    def _write(self) -> None:
        super()._write()
        if sys.stderr.isatty():
            print(f"\r{self._verb}: {self._done} of {self._total} prompts", end="\r", file=sys.stderr, flush=True)


def show(config: RunConfig, row: Mapping[str, Any]) -> None:
    """Print success with its interval, of all prompts and by what is known of them, and a few responses."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a log file has no width
    chance = "" if row["chance"] is None else f", chance {row['chance']:g}"
    name = {"wilson": "Wilson", "normal": "normal"}[row["interval"]]
    table = Table(title=f"{config.model.name}, data={config.data.name}, temperature {row['temperature']:g}{chance}")
    table.add_column("held-out prompts")
    for column in ("success", f"95 % interval ({name})", "examples"):
        table.add_column(column, justify="right")
    whole = {"success": row["success"], "low": row["success_low"], "high": row["success_high"]}
    parts = {"all": {**whole, "examples": row["examples"]}}
    for key, words in (("by_length", "{} tokens"), ("by_depth", "depth {}"), ("by_difficulty", "difficulty {}")):
        parts |= {words.format(label): cell for label, cell in (row[key] or {}).items()}
    for label, cell in parts.items():
        ends = "-" if cell["low"] is None else f"{cell['low']:.3f} to {cell['high']:.3f}"
        success = "-" if cell["success"] is None else f"{cell['success']:.3f}"
        table.add_row(label, success, ends, f"{cell['examples']:,}")
    console.print(table)
    for sample in row["samples"][:SHOWN]:
        console.print(
            f"...{sample['prompt_end'][-SHOWN_PROMPT:]!r} -> {sample['response']!r}, reward {sample['reward']}",
            markup=False,
            highlight=False,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate what the arguments ask for, print the table, write the row; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(__doc__)
        return 0
    try:
        config, checkpoint, out = configure(arguments)
        model, step = load(config, checkpoint)
        prompts = held_out(config)
        with MemoryMeter() as meter:
            row = evaluate(model, prompts, Monitor(meter, Shown(), backend=config.hardware.backend))
        out = out or Path(new_folder(config.claim or "evaluate"))
        row |= {"run_id": new_run_id(out.name), "step": step, "weights": checkpoint or config.model.checkpoint}
        path = write_evaluation(out, row, config)
    except (ValueError, OSError, RewardError) as error:
        print(f"longstraw.evaluate: {error}", file=sys.stderr)
        return 2
    show(config, row)
    print(f"row: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
