"""Predicted over measured seconds of a step on this processor, by verb.

    python -m benchmarks.clock [model=qwen3_6_tiny] [context=2Ki] [response=64] [chunk=512] [adapter=none]

Rates are calibrated by small operations in the model's own sizes: a matrix product, attention and its backward over one
tile of rows and an addition, and the host by a step that computes almost nothing. With them a simulation predicts each
verb of one step; the same step is run, detached and exact. Weights are drawn. One thread, CPU time of the process, so
that what else the machine does counts less; the meter of memory is on, as in every run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from benchmarks.meter_overhead import CountOperations
from longstraw.config import HardwareConfig, RatesConfig, RunConfig, from_dict, load_model_config, to_dict
from longstraw.config.settings import parse_settings
from longstraw.group import Group
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.ops.attention import cpu
from longstraw.ops.host_offload import QueryGradients
from longstraw.simulation.simulate import simulate
from longstraw.simulation.single_rank import RandomTask
from longstraw.step import grpo_step
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

BEYOND_CACHES = 2**24  # numbers
ROUNDS, SECONDS = 5, 0.2  # of which the median counts, and how long one lasts


@dataclass
class Settings:
    model: str = "qwen3_6_tiny"
    context: int = 2048
    response: int = 64
    chunk: int = 512
    adapter: str = "none"


def seconds(function: Callable[[], object]) -> float:
    """Return the CPU seconds of one call: the median of several rounds."""
    function()
    begun, calls = time.process_time(), 0
    while time.process_time() - begun < SECONDS / 4:
        function()
        calls += 1
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(calls):
            function()
        times.append((time.process_time() - begun) / calls)
    return statistics.median(times)


def calibrate(config: RunConfig) -> RatesConfig:
    """Return the rates of this processor for the sizes of ``config``."""
    model, chunk = config.model, config.chunk
    x, weight = torch.randn(chunk, model.hidden_size), torch.randn(model.intermediate_size, model.hidden_size)
    products = 2 * x.numel() * len(weight) / seconds(lambda: x @ weight.T)
    heads, shared, width = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    rows = min(config.prompt_positions // 2, 16384)
    q = torch.randn(shared, heads // shared, chunk, width)
    k, v = torch.randn(2, rows, shared, width).unbind()
    pairs = heads * width * chunk * rows
    forward = 4 * pairs / seconds(lambda: cpu.part_forward(q, k, v, causal=False, scale=1.0))
    queries = QueryGradients(q, q, *cpu.part_forward(q, k, v, causal=False, scale=1.0))
    backward = 10 * pairs / seconds(lambda: cpu.part_backward(queries, k, v, causal=False, scale=1.0))
    a, b, out = torch.empty(3, BEYOND_CACHES).unbind()
    memory = 3 * a.nbytes / seconds(lambda: torch.add(a, b, out=out))
    compute = dict.fromkeys(("products", "products_float32", "scan"), products / 1e12)
    compute |= {"attention": forward / 1e12, "attention_backward": backward / 1e12}
    compute |= dict.fromkeys(("chosen_rows", "scores"), forward / 1e12)
    return RatesConfig(**compute, memory=memory / 1e12, links=1.0, links_across=1.0, operation_us=host_seconds() * 1e6)


def host_seconds() -> float:
    """Return the CPU seconds of an operation that computes almost nothing: a step of the smallest model, 72 positions.

    An operation alone in a loop would take a fifth of it: there is no Python, no autograd and no cold cache around it.
    """
    model = build_model("llama_tiny", num_hidden_layers=1, hidden_size=16, vocab_size=32)
    ids = torch.zeros(64, dtype=torch.long)
    group = Group(ids, [ids[:8], ids[:8]], [0.0, 1.0])

    def step() -> None:
        grpo_step(model, group, chunk=64)

    with CountOperations() as counter:
        step()
    with MemoryMeter():
        return seconds(step) / counter.count


class CpuTime(Monitor):
    """Measures verbs by the CPU time of the process."""

    @contextmanager
    def verb(self, name: str, positions: int) -> Iterator[None]:
        begun = time.process_time()
        with super().verb(name, positions):
            yield
        self.seconds[name] = time.process_time() - begun


def measure(config: RunConfig) -> dict[str, float]:
    """Return the CPU seconds by verb of a second step, after one that warms up."""
    with MemoryMeter() as meter:
        watch = CpuTime(meter, Progress(None))
        trainer = build_trainer(config, watch, task=RandomTask(config))
        trainer.step(0)
        trainer.step(1)
        return dict(watch.seconds)


def configured(settings: Settings, prompt_grad: str, rates: RatesConfig | None = None) -> RunConfig:
    model = load_model_config(settings.model)
    hardware = HardwareConfig(name="cpu", backend="cpu", rates=rates or RatesConfig())
    return from_dict(
        {
            "model": {**to_dict(model), "checkpoint": None},
            "hardware": to_dict(hardware),
            "data": {"name": "needle"},
            "adapter": {"name": settings.adapter},
            "context": settings.context,
            "response_length": settings.response,
            "chunk": settings.chunk,
            "prompt_grad": prompt_grad,
            "steps": 2,
        }
    )


def main(arguments: list[str]) -> None:
    """Print the rates, and predicted and measured seconds of each verb."""
    settings = parse_settings(Settings, arguments, least=1)
    torch.set_num_threads(1)
    rates = calibrate(configured(settings, "detached"))
    known = (f"{name} {value:.3g}" for name, value in vars(rates).items() if not name.startswith("links"))
    print(f"{settings}\nrates: {', '.join(known)}\n")
    print("| prompt_grad | verb | predicted s | measured s | ratio | binds |\n|---|---|---:|---:|---:|---|")
    for prompt_grad in ("detached", "exact"):
        config = configured(settings, prompt_grad, rates)
        (said,) = simulate(replace(config, mode="simulate"))
        for verb, measured in measure(config).items():
            predicted, bound = said["predicted_seconds_by_verb"][verb], said["predicted_bound_by_verb"][verb]
            binds = ", ".join(f"{name} {value / predicted:.0%}" for name, value in bound.items() if value)
            ratio = predicted / measured
            print(f"| {prompt_grad} | {verb} | {predicted:.3f} | {measured:.3f} | {ratio:.2f} | {binds} |")


if __name__ == "__main__":
    main(sys.argv[1:])
