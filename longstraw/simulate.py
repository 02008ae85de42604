"""The step without its hardware: the real code on tensors that have shapes and no values, for one rank of the mesh.

Model, ``parallelize``, step, adapters and optimizer are those of a run, with the operations that the hardware's backend
would take; the process group sends nothing. What is allocated is counted as in a run on a processor, from tensor
storages. So a peak is known without a GPU, a network or weights. It is a count of what the program asks for: what the
CUDA context, NCCL and the allocator's gaps take beside it is ``hardware.reserve_gb``.

Work that repeats is stepped over: of chunks the first two and the last two are evaluated, of branches the first two
and the last one. Between them sizes are affine in the chunk's start, so none is larger than both ends.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from longstraw.config import RunConfig
from longstraw.memory import MemoryMeter
from longstraw.models import build_model
from longstraw.models.adapter import add_adapter
from longstraw.models.decoder import Block, Decoder
from longstraw.observe import Progress, Watch
from longstraw.parallel.apply import parallelize
from longstraw.parallel.mesh import Mesh
from longstraw.played import PlayedTask, play_job, played_rank
from longstraw.state import Carried, Past, RetainedState, Tensors
from longstraw.trainer import Spread, Trainer, build_trainer, model_facts

TIMES = ("seconds", "seconds_by_verb")  # a simulation's are not the step's


def simulate_job(config: RunConfig, run_dir: str | Path, **context: Any) -> None:
    """Simulate the largest steps of one job and write their records; ``context`` is that of ``run_job``."""
    play_job(simulate, "simulate", config, run_dir, **context)


def simulate(config: RunConfig, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of the steps that hold most: one on a fresh prompt and, where prompts are reused, one more.

    ``config.simulation`` says which rank is simulated, how unevenly experts are chosen, and whether all chunks and
    branches are evaluated.
    """
    config = replace(config, measure_drift=False)
    every = config.simulation.every
    with played_rank(config, "cpu") as mesh, FakeTensorMode() as fake, MemoryMeter() as meter:
        with unset_fake_temporarily():  # a group looks at its values
            task = PlayedTask(config, fake.from_tensor)
        watch = _Watch(meter, progress or Progress(None))
        trainer = build_trainer(config, watch, task=task, mesh=mesh, make_model=_model)
        facts = model_facts(trainer)
        if not every:
            trainer.model = Stepped(trainer.model, config)  # type: ignore[assignment]
        gc.collect()
        for step in _steps(trainer):
            watch.progress.step = step
            yield {**facts, **trainer.step(step), "stepped_over": not every, **dict.fromkeys(TIMES)}


def _steps(trainer: Trainer) -> list[int]:
    """Return the steps that hold most, the optimizer's state made where an earlier step would have made it."""
    every, steps = trainer.config.refresh_every, trainer.config.steps
    fresh = every if steps > every else 0
    trainer.optimizer.make_state()  # at first DTensor works out shapes, on tensors of their own that are no memory
    if not fresh:
        trainer.optimizer.drop_state()
    return [fresh] if every == 1 or steps == 1 else [fresh, fresh + 1]


class _Watch(Watch):
    """Has garbage collected between verbs: what the first use of PyTorch's own parts leaves is no part of a step."""

    @contextmanager
    def verb(self, name: str, positions: int) -> Iterator[None]:
        gc.collect()
        with super().verb(name, positions):
            yield


class Stepped:
    """A model that evaluates the chunks, branches and blocks that decide a step's peak, and stands in for the others.

    What is held grows from block to block, from chunk to chunk and not from branch to branch. So the first chunk and
    branch are evaluated whole, for what they make; of the next and the last the blocks at both ends are, which hold
    least and most. What stands in for the rest allocates what stays of it.
    """

    def __init__(self, model: Decoder, config: RunConfig):
        starts = range(0, config.prompt_positions - 1, config.chunk)
        self._model = model
        self._chunks = {*starts[:2], *starts[-2:]}
        self._branches = {0, 1, config.group_size - 1}
        self._verb, self._branch = "", itertools.count()
        self._seen: set[str] = set()
        self._carried: list[bool] = []
        self._rows: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = []  # what a position adds to each state
        blocks = model._blocks()
        ends = _ends([_signature(block) for block in blocks])
        self._blocks = [_Block(block, i in ends) for i, block in enumerate(blocks)]
        model._blocks = lambda: self._blocks  # type: ignore[method-assign, assignment, return-value]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_states(self, *arguments: Any, **keywords: Any) -> list[RetainedState]:
        states = self._model.new_states(*arguments, **keywords)
        self._carried = [isinstance(state, Carried) for state in states]
        return states

    def __call__(self, tokens: Tensor, past: Sequence[Past], state_only: bool = False) -> Any:
        verb = f"{state_only} {torch.is_grad_enabled()}"
        if verb != self._verb:
            self._verb, self._branch = verb, itertools.count()
        if not self._is_evaluated(past[0].positions, state_only):
            chunk = self._model.split(len(tokens))
            count, width = chunk.stop - chunk.start, self._model.config.hidden_size
            if state_only:
                return None, [self._update(i, layer, count) for i, layer in enumerate(past)]
            hidden = torch.empty(count, width, dtype=self._model.lm_head.weight.dtype)
            return hidden.requires_grad_(torch.is_grad_enabled()), []
        for i, block in enumerate(self._blocks):
            block.update = None if verb not in self._seen else partial(self._update, i)
        result = self._model(tokens, past, state_only)
        self._seen.add(verb)
        self._rows = self._rows or [{n: (tuple(x.shape[1:]), x.dtype) for n, x in each.items()} for each in result[1]]
        return result

    def _is_evaluated(self, start: int, state_only: bool) -> bool:
        return start in self._chunks if state_only else next(self._branch) in self._branches

    def _update(self, layer: int, past: Past, count: int) -> Tensors:
        """Return an update of the right sizes; what a summary owes passes through as if it had not changed."""
        rows = self._rows[layer].items()
        if self._carried[layer]:
            return {name: past[name].clone() for name, _ in rows}
        return {name: torch.empty(count, *shape, dtype=dtype) for name, (shape, dtype) in rows}


class _Block:
    """A block that is evaluated, or stood in for where it is not at an end and ``update`` says what it would add."""

    def __init__(self, block: Block, at_end: bool):
        self._block, self._at_end = block, at_end
        self._trained = any(p.requires_grad for p in block.parameters())
        self._hands: Callable[[Any], Any] = lambda handed: handed
        self.update: Callable[[Past, int], Tensors] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __call__(self, x: Tensor, past: Past, handed: Any, state_only: bool) -> Any:
        begins = self._trained and torch.is_grad_enabled() and not x.requires_grad  # a graph begins here
        if self._at_end or self.update is None or begins:
            result = self._block(x, past, handed, state_only)
            if isinstance(result[2], Tensor) and result[2] is not handed:
                self._hands = partial(_new, tuple(result[2].shape), result[2].dtype)
            return result
        return _StandIn.apply(x), self.update(past, len(x)), self._hands(handed)


class _StandIn(torch.autograd.Function):
    """[t, d] -> [t, d], as much as a block makes; its input is kept, as a checkpoint keeps a block's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        return torch.empty_like(grad)


def _new(shape: tuple[int, ...], dtype: torch.dtype, handed: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _signature(block: Block) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())


def _ends(kinds: Sequence[Any]) -> set[int]:
    """Return the first and the last blocks, as many as show every kind between every two neighbours that it has."""

    def run(order: Sequence[int]) -> set[int]:
        seen: set[Any] = set()
        wanted = {_neighbours(kinds, i) for i in order}
        for place, i in enumerate(order):
            seen.add(_neighbours(kinds, i))
            if len(seen) >= len(wanted) - 2:  # the other end's own
                return {*order[: place + 2]}
        return set(order)

    return run(range(len(kinds))) | run(range(len(kinds))[::-1])


def _neighbours(kinds: Sequence[Any], i: int) -> tuple[Any, ...]:
    return tuple(kinds[j] if 0 <= j < len(kinds) else None for j in (i - 1, i, i + 1))


def _model(config: RunConfig, mesh: Mesh | None) -> Spread:
    """Return the model with its adapter on fake tensors, spread where there are several ranks; nothing is drawn."""
    with unset_fake_temporarily():
        model = build_model(config.model, device="meta", backend=config.hardware.backend, fake=True)
        model = add_adapter(model, config.adapter)
    for module in model.modules():  # ``to_empty`` swaps tensors, which fake ones do not take part in
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return model, None if mesh is None else parallelize(model, mesh)
