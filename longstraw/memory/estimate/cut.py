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
from functools import partial
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
from longstraw.simulation.single_rank import RandomTask, fake_rank, simulated_source
from longstraw.step import prefill
from longstraw.timing.meter import WorkMeter
from longstraw.timing.work import all_blocks
from longstraw.training.model import Spread
from longstraw.training.monitor import Progress
from longstraw.training.optimizer import Optimizer
from longstraw.training.trainer import build_trainer

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
            self._trainer = build_trainer(
                config,
                self._watch,
                task=task,
                make_model=partial(self._make_model, mesh=mesh),
                source=simulated_source(config),
            )
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
        left_out = _trained(self._cuts[0].left_out())
        narrow, of_left_out = _bytes(trainer.optimizer.parameters), _bytes(left_out)
        verbs = {**watch.verbs, "optimizer": watch.before_update}
        last = {}
        for verb, pieces in self._work.verbs.items() if self._work is not None else ():
            parts = all_blocks([piece for piece in pieces if piece.evaluated][-1], kinds)
            last[verb] = [list(astuple(part)) for part in parts]
        return Counts(
            verbs,
            watch.host + (0 if config.optimizer.device is None else of_left_out),
            len(trainer.optimizer.parameters) + len(left_out),
            narrow + of_left_out,
            _narrowed(trainer.optimizer),
            last,
        )

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
        sizes = {block: _bytes([*block.parameters(), *block.buffers()]) for block in set(self.left_out())}
        self._held += [torch.empty(sizes[block], dtype=torch.uint8) for block in self.left_out()]
        meter.tag("parameters", self._held)

    def make_optimizer_state(self, optimizer: Optimizer, meter: MemoryMeter) -> None:
        """Hold what ``optimizer`` holds for the trained parameters that are left out."""
        empty = torch.empty if optimizer.config.device is None else host_empty
        sizes = {
            block: _bytes(x for p in _trained([block]) for x in optimizer.own(p)) for block in set(self.left_out())
        }
        made = [empty((sizes[block],), dtype=torch.uint8) for block in self.left_out()]
        meter.tag("optimizer", made)
        self._held += made

    def left_out(self) -> list[Block]:
        """Return, for each block that is left out, the one in its place."""
        return [block for block, here in self.blocks if not here]


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


def _trained(blocks: Iterable[Block]) -> list[nn.Parameter]:
    return [parameter for block in blocks for parameter in block.parameters() if parameter.requires_grad]


def _narrowed(optimizer: Optimizer) -> int:
    """Return the most bytes by which narrower copies of the gradients exceed what was freed for those before."""
    sizes = [_bytes([p]) for p in optimizer.parameters if optimizer.is_summed(p)]
    freed = [0, *itertools.accumulate(sizes)]  # a copy has half the bytes
    return max((size - before for size, before in zip(sizes, freed, strict=False)), default=0)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that this rank holds of ``tensors``, each rounded up as it is allocated."""
    return sum(-(-local_tensor(x.detach()).nbytes // CUDA_BLOCK) * CUDA_BLOCK for x in tensors)
