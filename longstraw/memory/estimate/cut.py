"""One rank's step of a model of which a few blocks are made: what it holds, verb by verb, counted within seconds.

The step is the simulated one at full depth, but of blocks alike only those exist that decide a peak. The parameters,
gradients and optimizer state of the others are allocated in the sizes of one of their kind.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from longstraw.config import RunConfig
from longstraw.memory.estimate import SHORTEST_GROUP
from longstraw.memory.estimate.counts import Counts, Kinds, keep, lookup, of_one_cut
from longstraw.memory.meter import CUDA_BLOCK, MemoryMeter
from longstraw.models.decoder import Block, Decoder
from longstraw.ops.host_offload import host_empty
from longstraw.parallel.fsdp import local_tensor
from longstraw.parallel.mesh import Mesh
from longstraw.parallel.parallel_dims import resolve_dims
from longstraw.simulation.sampled_model import Made, SampledModel, graphs, neighbours, signature
from longstraw.simulation.simulate import SimulationMonitor, fake_model
from longstraw.simulation.single_rank import RandomTask, fake_rank
from longstraw.step import prefill
from longstraw.timing.meter import WorkMeter
from longstraw.timing.work import all_blocks
from longstraw.training.monitor import Progress
from longstraw.training.optimizer import Optimizer
from longstraw.training.trainer import Spread, build_trainer

WORTH_PROCESSES = 8  # steps


def count_steps(steps: Sequence[RunConfig]) -> None:
    """Count those of ``steps`` that have not been counted, those of several models in processes of their own.

    This process must not have joined a process group.
    """
    groups: dict[str, list[RunConfig]] = {}
    for step in steps:
        if lookup(step) is None:
            groups.setdefault(of_one_cut(step), []).append(step)
    processes = min(len(groups), os.cpu_count() or 1)
    if processes > 1 and len(steps) >= WORTH_PROCESSES:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            made = list(pool.map(_count, groups.values()))
    else:
        made = [_count(group) for group in groups.values()]
    for group, counted in zip(groups.values(), made, strict=True):
        for step, counts in zip(group, counted, strict=True):
            keep(step, counts)  # in this process too


def _count(steps: Sequence[RunConfig]) -> list[Counts]:
    """Return the counts of steps that one cut model takes, each kept as soon as it is made."""
    counted = []
    with CutStep(steps[0]) as cut:
        for step in steps:
            counted.append(cut.take(step))
            keep(step, counted[-1])
    return counted


class CutStep:
    """The step of one rank of ``config`` with most blocks left out. While entered it can be taken several times.

    Between two steps the context, the prompt gradient and the state may differ, and nothing else.
    """

    def __init__(self, config: RunConfig):
        self._config = config
        self._cuts: list[_Cut] = []  # of the model, and of the reference's where that is another

    def __enter__(self) -> CutStep:
        with ExitStack() as stack:
            mesh = stack.enter_context(fake_rank(self._config, "cpu"))
            self._fake = stack.enter_context(FakeTensorMode())
            self._meter = stack.enter_context(MemoryMeter())
            hardware = self._config.hardware
            self._work = stack.enter_context(WorkMeter(hardware)) if hardware.rates.known else None
            self._watch = _Watch(self._meter, Progress(None), self._work)
            task, config = self._task(self._config), self._config
            self._trainer = build_trainer(config, self._watch, task=task, mesh=mesh, make_model=self._make_model)
            self._models = [self._trainer.model, self._trainer.reference]
            self._trainer.optimizer.make_state()
            for cut in self._cuts:
                cut.make_parameters(self._meter)
            self._cuts[0].make_optimizer_state(self._trainer.optimizer, self._meter)
            self._learn_sizes()
            self._stack = stack.pop_all()
        gc.collect()
        gc.freeze()  # what is collected between verbs is what they left
        return self

    def __exit__(self, *exception: Any) -> None:
        gc.unfreeze()
        self._stack.__exit__(*exception)

    def take(self, config: RunConfig) -> Counts:
        """Return what the step of ``config`` holds."""
        trainer, watch = self._trainer, self._watch
        trainer.config = config
        trainer.task = self._task(trainer.config)
        gradients: list[Tensor] = []

        def make_gradient(parameter: nn.Parameter) -> None:
            dtype = torch.float32 if trainer.optimizer.is_summed(parameter) else parameter.dtype
            gradients.append(torch.empty(local_tensor(parameter).shape, dtype=dtype))
            self._meter.tag("gradients", gradients[-1])

        for name, model, cut in zip(("model", "reference"), self._models, self._cuts, strict=False):
            chosen = cut.blocks, _chunks(config), graphs(config)
            sampled = SampledModel(model, *chosen, make_gradient, cut.made)  # type: ignore[arg-type]
            setattr(trainer, name, sampled)
            if self._work is not None and name == "model":
                kinds = sampled.count_work(self._work)
        watch.verbs, watch.host = {}, 0
        gc.collect()
        try:
            trainer.step(0)
        finally:
            trainer.shared = None
        trained = [*trainer.optimizer.parameters, *self._cuts[0].left_out()]
        left_out = 0 if config.optimizer.device is None else _narrow_bytes(self._cuts[0].left_out())
        verbs = {**watch.verbs, "optimizer": watch.before_update}
        last = {}
        for verb, pieces in self._work.verbs.items() if self._work is not None else ():
            parts = all_blocks([piece for piece in pieces if piece.evaluated][-1], kinds)
            last[verb] = [list(astuple(part)) for part in parts]
        narrow, narrowed = _narrow_bytes(trained), _narrowed(trainer.optimizer)
        return Counts(verbs, watch.host + left_out, len(trained), narrow, narrowed, last)

    def _learn_sizes(self) -> None:
        """Evaluate one chunk before any step, so that all steps evaluate the same and a line joins like with like."""
        prompt = self._trainer.task.group(0).prompt
        for model, cut in zip(self._models, self._cuts, strict=False):
            sampled = SampledModel(model, cut.blocks, {0}, SHORTEST_GROUP, lambda _: None, cut.made)  # type: ignore[arg-type]
            prefill(sampled, prompt[: self._config.chunk + 1], chunk=self._config.chunk)  # type: ignore[arg-type]

    def _task(self, config: RunConfig) -> RandomTask:
        with unset_fake_temporarily():  # a group looks at its values
            return RandomTask(config, self._fake.from_tensor)

    def _make_model(self, config: RunConfig, mesh: Mesh | None) -> Spread:
        self._cuts.append(_Cut())
        return fake_model(config, mesh, self._cuts[-1])


class _Cut:
    """Cuts a model to the blocks that decide peaks, and holds what the others would."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Block, bool]] = []  # at full depth: one that is left out is one of its kind
        self.made: dict[Any, Made] = {}  # by the blocks of each kind
        self._held: list[Any] = []

    def __call__(self, model: Decoder) -> None:
        blocks: list[Block] = list(model.model.layers)  # type: ignore[arg-type]
        kinds = [signature(block) for block in blocks]
        evaluated = decisive(kinds)
        made = [i if i in evaluated else kinds.index(kind) for i, kind in enumerate(kinds)]
        self.blocks = [(blocks[at], at == i) for i, at in enumerate(made)]
        model.model.layers = nn.ModuleList(block for block, here in self.blocks if here)

    def make_parameters(self, meter: MemoryMeter) -> None:
        for block, here in self.blocks:
            if not here:
                self._held += [_like(tensor) for tensor in (*block.parameters(), *block.buffers())]
        meter.tag("parameters", self._held)

    def make_optimizer_state(self, optimizer: Optimizer, meter: MemoryMeter) -> None:
        """Hold what ``optimizer`` holds for a parameter, for each that is left out."""
        for parameter in self.left_out():
            own = optimizer.own(parameter)
            device = optimizer.config.device
            made = [_like(x) if device is None else host_empty(x.shape, x.dtype) for x in map(local_tensor, own)]
            meter.tag("optimizer", made)
            self._held += made

    def left_out(self) -> Iterator[nn.Parameter]:
        """Yield, for each trained parameter of a block that is left out, that of the block in its place."""
        for block, here in self.blocks:
            yield from () if here else (p for p in block.parameters() if p.requires_grad)


class _Watch(SimulationMonitor):
    """Keeps each verb's peak by kind; what the first use of PyTorch's own parts leaves is collected between verbs."""

    def __init__(self, meter: MemoryMeter, progress: Progress, work: WorkMeter | None):
        super().__init__(meter, progress, work)
        self.verbs: dict[str, Kinds] = {}
        self.before_update: Kinds = {}
        self.host = 0

    @contextmanager
    def verb(self, name: str, positions: int) -> Iterator[None]:
        with super().verb(name, positions):
            self.meter.reset_peak()
            self.before_update = self.meter.bytes_by_kind()
            yield
        kinds = self.meter.peak_bytes_by_kind
        self.verbs[name] = max(kinds, self.verbs.get(name, {}), key=lambda at: sum(at.values()))
        self.host = max(self.host, self.meter.host_peak)


def _chunks(config: RunConfig) -> set[int]:
    """Return where the chunks start that are evaluated: the last one and, if a rank has less of it, that before."""
    retained, ranks = config.prompt_positions - 1, resolve_dims(config.model, config.hardware).cp
    starts = range(0, retained, config.chunk)
    shorter = -(-(retained % config.chunk or config.chunk) // ranks) < -(-config.chunk // ranks)
    return set(starts[-1 - shorter :])


def decisive(kinds: list[Any]) -> set[int]:
    """Return the last block of each kind between each two neighbours, with those; the first two; each kind's first."""
    last = {neighbours(kinds, i): i for i in range(len(kinds))}.values()
    near = {near for i in last for near in (i - 1, i, i + 1)} | {0, 1}
    return {i for i in near if 0 <= i < len(kinds)} | {kinds.index(kind) for kind in kinds}


def _like(tensor: Tensor) -> Tensor:
    """Return a tensor with as many bytes as this rank holds of ``tensor``."""
    return torch.empty(local_tensor(tensor.detach()).untyped_storage().nbytes(), dtype=torch.uint8)


def _narrowed(optimizer: Optimizer) -> int:
    """Return the most bytes by which narrower copies of the gradients exceed what was freed for those before."""
    sizes = [_narrow_bytes([p]) for p in optimizer.parameters if optimizer.is_summed(p)]
    freed = [0, *itertools.accumulate(sizes)]  # a copy has half the bytes
    return max((size - before for size, before in zip(sizes, freed, strict=False)), default=0)


def _narrow_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of gradients in the parameters' own dtype."""
    return sum(-(-local_tensor(p.detach()).nbytes // CUDA_BLOCK) * CUDA_BLOCK for p in parameters)
