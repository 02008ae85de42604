"""Throughput of a prefill, and where its time goes.

    python -m benchmarks.prefill [model=qwen3_6_tiny] [prompt=65536] [chunk=2048]

Prints tokens a second over the whole prompt and over its last quarter, and the operators that take the most time in one
chunk at the end of the prompt, by the profiler of PyTorch. The profile is of a second run of that chunk: it slows what
it watches.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

from longstraw.models import build_model
from longstraw.observer import Observer
from longstraw.step import prefill

OPERATORS = 12


class Clock(Observer):
    """Note the time after every chunk."""

    def __init__(self) -> None:
        self.positions, self.times = [0], [time.perf_counter()]

    def advance(self, positions: int) -> None:
        self.positions.append(self.positions[-1] + positions)
        self.times.append(time.perf_counter())

    def rate(self, first: int) -> float:
        """Return tokens a second from chunk ``first`` on."""
        return (self.positions[-1] - self.positions[first]) / (self.times[-1] - self.times[first])


def main(arguments: list[str]) -> None:
    """Run one prefill, then profile its last chunk again."""
    options = {"model": "qwen3_6_tiny", "prompt": "65536", "chunk": "2048"}
    options |= dict(argument.split("=", 1) for argument in arguments)
    prompt, chunk = int(options["prompt"]), int(options["chunk"])
    model = build_model(options["model"])
    tokens = torch.randint(model.config.vocab_size, (prompt + 1,), generator=torch.Generator().manual_seed(0))
    clock = Clock()
    retained = prefill(model, tokens, chunk=chunk, observer=clock)
    chunks = len(clock.times) - 1
    threads = torch.get_num_threads()
    print(f"{options['model']}, prompt {prompt:,}, chunk {chunk:,}, {threads} thread{'s' * (threads > 1)}")
    print(f"{clock.rate(0):,.0f} tokens a second, {clock.rate(chunks * 3 // 4):,.0f} over the last quarter\n")
    past = [state.leaves(state.positions, grad=False) for state in retained.states]
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as watched:
        model(tokens[:chunk], past, state_only=True)
    averages = watched.key_averages()
    total = sum(row.self_cpu_time_total for row in averages)
    print("| operator | share | calls |\n|---|---:|---:|")
    for row in sorted(averages, key=lambda row: -row.self_cpu_time_total)[:OPERATORS]:
        print(f"| {row.key} | {row.self_cpu_time_total / total:.1%} | {row.count:,} |")


if __name__ == "__main__":
    main(sys.argv[1:])
