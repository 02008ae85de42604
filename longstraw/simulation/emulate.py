"""One rank's share of a job on one device: real memory and time, meaningless values (``mode=emulate``).

The device holds what the played rank would hold and computes what it would compute, the other ranks' part excepted:
collectives allocate their results and send nothing. So what a step takes on many GPUs is measured on one, but for the
time that communication takes. Chunks and branches that repeat are left out (``sampled_model``), and then the step has
no time, unless ``simulation.every`` is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from longstraw.config import RunConfig
from longstraw.memory.meter import MemoryMeter
from longstraw.models import build_model
from longstraw.models.lora import add_adapter
from longstraw.parallel.fsdp import local_tensor
from longstraw.parallel.mesh import Mesh
from longstraw.parallel.parallelize import parallelize
from longstraw.simulation.single_rank import TIMES, RandomTask, fake_rank, sample_model, simulated_source
from longstraw.training.model import Spread
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer, model_facts


def emulate(config: RunConfig, progress: Progress, watching: type[Monitor] = Monitor) -> Iterator[dict[str, Any]]:
    """Yield the record of every step of the rank that ``config.simulation`` names; ``watching`` observes it."""
    config = replace(config, measure_drift=False, warmup_steps=0)
    backend, every = config.hardware.backend, config.simulation.every
    with fake_rank(config, backend) as mesh, MemoryMeter() as meter:
        watch = watching(meter, progress, backend=backend)
        make_model, source = partial(_model, mesh=mesh), simulated_source(config)
        trainer = build_trainer(config, watch, task=RandomTask(config), make_model=make_model, source=source)
        facts = model_facts(trainer) | {"stepped_over": not every}
        sample_model(trainer, blocks=False)
        for step in range(config.steps):
            progress.step = step
            yield {**facts, **trainer.step(step), **({} if every else dict.fromkeys(TIMES))}


def _model(config: RunConfig, mesh: Mesh | None) -> Spread:
    """Return the played rank's part of the model, drawn where it is: the whole is never made."""
    device = torch.device(config.hardware.backend)
    model = add_adapter(build_model(config.model, device="meta", backend=device.type), config.adapter)
    parallel = None if mesh is None else parallelize(model, mesh)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(config.seed)
    for tensor in (*model.parameters(), *model.buffers()):
        part = local_tensor(tensor.detach())
        nn.init.normal_(part, std=config.model.initializer_range, generator=generator)
    return model, parallel
