"""The step without its hardware: the real code on tensors that have shapes and no values, for one rank of the mesh.

Model, ``parallelize``, step, adapters and optimizer are those of a run, with the operations that the hardware's backend
would take; the process group sends nothing. What is allocated is counted as in a run on a processor, from tensor
storages. So a peak is known without a GPU, a network or weights. It is a count of what the program asks for: what the
CUDA context, NCCL and the allocator's gaps take beside it is ``hardware.reserve_gb``.

Work that repeats is left out (``sampled_model``), unless ``simulation.every`` is set.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from longstraw.config import RunConfig
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.models.decoder import Decoder
from longstraw.models.lora import add_adapter
from longstraw.parallel.mesh import Mesh
from longstraw.parallel.parallelize import parallelize
from longstraw.simulation.single_rank import TIMES, RandomTask, fake_rank, sample_model, simulated_source
from longstraw.timing.meter import WorkMeter
from longstraw.timing.work import BlockKind, step_flops, step_seconds
from longstraw.training.model import Spread
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import Trainer, build_trainer, model_facts


def simulate(config: RunConfig, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of the steps that hold most: one on a fresh prompt and, where prompts are reused, one more.

    ``config.simulation`` says which rank is simulated, how unevenly experts are chosen, and whether all chunks,
    branches and blocks are evaluated. What measuring the drift of a shared prompt holds beside a step is not counted.
    """
    config = replace(config, measure_drift=False, warmup_steps=0)
    every = config.simulation.every
    work = WorkMeter(config.hardware) if config.hardware.rates.known else None
    with fake_rank(config, "cpu") as mesh, FakeTensorMode() as fake, MemoryMeter() as meter, work or nullcontext():
        with unset_fake_temporarily():  # a group looks at its values
            task = RandomTask(config, fake.from_tensor)
        watch = SimulationMonitor(meter, progress or Progress(None), work)
        make_model, source = partial(fake_model, mesh=mesh), simulated_source(config)
        trainer = build_trainer(config, watch, task=task, make_model=make_model, source=source)
        facts = model_facts(trainer)
        kinds = sample_model(trainer, blocks=True, work=work)
        gc.collect()
        for step in _steps(trainer):
            watch.progress.step = step
            row = {**facts, **trainer.step(step), "stepped_over": not every, **dict.fromkeys(TIMES)}
            yield row | (predicted_times(work, kinds, config.hardware.backend) if work is not None else {})


def predicted_times(work: WorkMeter, kinds: list[BlockKind], backend: str) -> dict[str, Any]:
    """Return what the record says of the time that the counted work takes; only GPUs compute while the host goes on.

    Drawing is left out: a token's time is that of starting its kernels, which is not counted.
    """
    verbs = {name: pieces for name, pieces in work.verbs.items() if name != "sample"}
    bound = step_seconds(verbs, kinds, overlap=backend == "cuda")
    return {
        "predicted_seconds_by_verb": {verb: sum(parts.values()) for verb, parts in bound.items()},
        "predicted_bound_by_verb": bound,
        "rank_flops_by_verb": step_flops(verbs, kinds),
    }


def _steps(trainer: Trainer) -> list[int]:
    """Return the steps that hold most, the optimizer's state made where an earlier step would have made it."""
    every, steps = trainer.config.refresh_every, trainer.config.steps
    fresh = every if steps > every else 0
    if fresh:
        trainer.optimizer.make_state()
    return [fresh] if every == 1 or fresh + 1 >= steps else [fresh, fresh + 1]


class SimulationMonitor(Monitor):
    """Has garbage collected between verbs: what the first use of PyTorch's own parts leaves is no part of a step."""

    def __init__(self, meter: MemoryMeter, progress: Progress, work: WorkMeter | None):
        super().__init__(meter, progress)
        self._work = work

    def start(self) -> None:
        super().start()
        if self._work is not None:
            self._work.reset()

    @contextmanager
    def verb(self, name: str, positions: int) -> Iterator[None]:
        gc.collect()
        with super().verb(name, positions), self._work.verb(name) if self._work is not None else nullcontext():
            yield

    def advance(self, positions: int) -> None:
        super().advance(positions)
        if self._work is not None:
            self._work.advance()


def fake_model(config: RunConfig, mesh: Mesh | None, cut: Callable[[Decoder], object] = lambda model: None) -> Spread:
    """Return the model with its adapter on fake tensors, spread where there are several ranks; nothing is drawn.

    ``cut`` may leave out blocks before the rest is made.
    """
    with unset_fake_temporarily():
        model = build_model(config.model, device="meta", backend=config.hardware.backend, fake=True)
        model = add_adapter(model, config.adapter)
        cut(model)
    for module in model.modules():  # ``to_empty`` swaps tensors, which fake ones do not take part in
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return model, None if mesh is None else parallelize(model, mesh)
