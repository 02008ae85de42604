"""Time a small training step with and without the memory meter, side by side.

    python -m benchmarks.meter_overhead [--rounds 20] [--width 32 256] [--positions 256]

Plain, under a dispatch mode that does nothing, and under `MemoryMeter` take turns in every round, so that what else the
machine does falls on all three alike; medians of CPU time are compared. The mode that does nothing is PyTorch's floor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.memory.meter import MemoryMeter


class Nothing(TorchDispatchMode):
    """Pass every operation on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class CountOperations(TorchDispatchMode):
    """Count what a step dispatches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def training_step(width: int, positions: int) -> Callable[[], None]:
    """Build a two-layer transformer with AdamW and give its step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(256, width), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(positions).remainder(256)[None]

    def step() -> None:
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Print the median CPU time of a step in each way, and the ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--positions", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for width in options.width:
        step = training_step(width, options.positions)
        ways: dict[str, Callable[[], AbstractContextManager]] = {
            "plain": nullcontext,
            "empty mode": Nothing,
            "meter": MemoryMeter,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        step()
        with CountOperations() as counter:
            step()
        for _ in range(options.rounds):
            for name, enter in ways.items():
                with enter():
                    start = time.process_time()
                    step()
                    seconds[name].append(time.process_time() - start)
        median = {name: statistics.median(times) for name, times in seconds.items()}
        print(
            f"width {width}, {options.positions} positions, {counter.count} operations a step, {options.rounds} rounds"
        )
        for name, value in median.items():
            added = (value - median["plain"]) / counter.count * 1e6
            print(f"  {name:11} {value * 1e3:8.2f} ms  x{value / median['plain']:.2f}  +{added:.1f} us an operation")


if __name__ == "__main__":
    main()
