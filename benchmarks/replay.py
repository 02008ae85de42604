"""Replay of a group, one branch at a time and several in one graph, side by side on the same retained prompt.

    python -m benchmarks.replay [model=qwen3_6_tiny] [prompt=2048] [group=8] [response=64] [prompt_grad=exact]
        [repeats=3] [peaks=true]

Both sides add the gradient of the same loss; they take turns and the fastest of ``repeats`` counts. ``together`` has
all branches in one graph. Log-probabilities and the gradient are compared before anything is printed. Peaks are bytes
of live tensor storages, counted in runs that are not timed: that of all branches together beside that of one branch of
as many positions.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.group import Group
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.models.decoder import Decoder
from longstraw.step import PreparedGroup, Retained, StepOptions, prefill, replay

CLOSE = 1e-4  # relative distance of two gradients in float32


@dataclass(frozen=True)
class Measured:
    """One replay: its seconds on the clock and of the processor, and what it computed."""

    wall: float
    cpu: float
    logprobs: list[Tensor]
    gradient: Tensor


def make_group(model: Decoder, prompt: int, lengths: list[int]) -> Group:
    """Draw a prompt, responses of the given lengths and rewards."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(model.config.vocab_size, (n,), generator=generator) for n in (prompt, *lengths)]
    return Group(ids[0], ids[1:], [float(i % 2) for i in range(len(lengths))])


def retain(model: Decoder, group: Group, options: StepOptions) -> Retained:
    """Evaluate the group's prompt."""
    return prefill(model, group.prompt, chunk=options.chunk, grad_from=options.grad_from(group.prompt))


def measure(model: Decoder, prepared: PreparedGroup, options: StepOptions) -> Measured:
    """Replay once; the state's gradient goes on growing, which changes no time."""
    model.zero_grad(set_to_none=True)
    wall, cpu = time.perf_counter(), time.process_time()
    _, logprobs, *_ = replay(model, prepared, options)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return Measured(wall, cpu, logprobs, gradient)


def peak(name: str, prompt: int, lengths: list[int], options: StepOptions) -> int:
    """Return the peak of a replay after one that made the gradients."""
    with MemoryMeter() as meter:
        model = build_model(name)
        group = make_group(model, prompt, lengths)
        prepared = PreparedGroup(group, retain(model, group, options))
        for _ in range(2):
            meter.reset_peak()
            replay(model, prepared, options)
        return meter.peak


def main(arguments: list[str]) -> None:
    """Compare both sides and print a table."""
    options = {"model": "qwen3_6_tiny", "prompt": "2048", "group": "8", "response": "64"}
    options |= {"prompt_grad": "exact", "repeats": "3", "peaks": "true"}
    options |= dict(argument.split("=", 1) for argument in arguments)
    name, mode = options["model"], options["prompt_grad"]
    prompt, size, length = (int(options[key]) for key in ("prompt", "group", "response"))
    sides = {
        "one at a time": StepOptions(512, mode, replay_tokens=length),
        "together": StepOptions(512, mode, replay_tokens=size * length),
    }
    model = build_model(name)
    group = make_group(model, prompt, [length] * size)
    prepared = PreparedGroup(group, retain(model, group, sides["together"]))
    fastest: dict[str, Measured] = {}
    for _ in range(int(options["repeats"])):
        for side, given in sides.items():
            found = measure(model, prepared, given)
            fastest[side] = min(found, fastest.get(side, found), key=lambda one: one.cpu)
    alone, together = fastest.values()
    furthest = max(float((a - b).abs().max()) for a, b in zip(alone.logprobs, together.logprobs, strict=True))
    distance = float((alone.gradient - together.gradient).norm() / alone.gradient.norm())
    assert max(furthest, distance) < CLOSE, f"the sides differ: log-probabilities {furthest}, gradient {distance}"
    print(f"{name}, {mode}, prompt {prompt:,}, {size} branches of {length}; gradients differ by {distance:.1e}\n")
    print("| branches | seconds | CPU-seconds | of one at a time |\n|---|---:|---:|---:|")
    for side, one in fastest.items():
        print(f"| {side} | {one.wall:.2f} | {one.cpu:.2f} | {one.cpu / alone.cpu:.3f} |")
    if options["peaks"] == "true":
        packed = peak(name, prompt, [length] * size * 2, sides["together"])
        single = peak(name, prompt, [size * length] * 2, sides["together"])
        print(f"\npeak {packed:,} bytes, of one branch of {size * length} positions {single:,}: {packed / single:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
