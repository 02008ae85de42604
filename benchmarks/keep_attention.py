"""A grouped step detached, exact, and exact with attention's results kept, side by side in one process.

    python -m benchmarks.keep_attention [model=qwen3_6_tiny] [prompt=16384] [chunk=2048] [group=2] [response=64]
        [repeats=3]

The sides take turns and the fastest of ``repeats`` counts, in seconds of the processor. Before anything is printed the
gradients with and without are compared bit by bit. Peaks are bytes of live tensor storages, counted in runs that are
not timed.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.replay import make_group
from longstraw.config import StateConfig
from longstraw.group import Group
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.models.decoder import Decoder
from longstraw.step import grpo_step

SIDES: dict[str, dict[str, Any]] = {
    "detached": {"prompt_grad": "detached"},
    "exact": {"prompt_grad": "exact"},
    "exact, kept": {"prompt_grad": "exact", "state": StateConfig(keep_attention=True)},
}


def step(model: Decoder, group: Group, chunk: int, side: str) -> tuple[float, Tensor]:
    """Return the CPU-seconds of one step and the gradient of all parameters."""
    model.zero_grad(set_to_none=True)
    begun = time.process_time()
    grpo_step(model, group, chunk=chunk, **SIDES[side])
    seconds = time.process_time() - begun
    return seconds, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def peak(name: str, lengths: tuple[int, int, int], chunk: int, side: str) -> int:
    """Return the most bytes that a step holds; ``lengths`` are those of prompt and response, and the group's size."""
    prompt, response, size = lengths
    with MemoryMeter() as meter:
        model = build_model(name)
        grpo_step(model, make_group(model, prompt, [response] * size), chunk=chunk, **SIDES[side])
        return meter.peak


def main(arguments: list[str]) -> None:
    """Compare the sides and print a table."""
    options = {"model": "qwen3_6_tiny", "prompt": "16384", "chunk": "2048", "group": "2", "response": "64"}
    options |= {"repeats": "3"} | dict(argument.split("=", 1) for argument in arguments)
    name, chunk = options["model"], int(options["chunk"])
    prompt, size, response = (int(options[key]) for key in ("prompt", "group", "response"))
    model = build_model(name)
    group = make_group(model, prompt, [response] * size)
    fastest: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}
    for _ in range(int(options["repeats"])):
        for side in SIDES:
            seconds, gradients[side] = step(model, group, chunk, side)
            fastest[side] = min(seconds, fastest.get(side, seconds))
    assert torch.equal(gradients["exact"], gradients["exact, kept"]), "the gradients differ"
    print(f"{name}, prompt {prompt:,} in chunks of {chunk:,}, {size} responses of {response}\n")
    print("| side | CPU-seconds | of detached | peak MB |\n|---|---:|---:|---:|")
    for side, seconds in fastest.items():
        held = peak(name, (prompt, response, size), chunk, side) / 1e6
        print(f"| {side} | {seconds:.2f} | {seconds / fastest['detached']:.2f} | {held:.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
