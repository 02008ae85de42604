"""A model that is evaluated where a step's peak is decided; elsewhere only sizes are allocated: a step takes minutes.

Of chunks the first and the last two are evaluated, of the graphs of branches the first two and the last one. Between
them sizes are affine in a chunk's start, so none is larger than both ends. Blocks of one kind hold alike, but for what
the blocks before them have left, which grows: those at both ends are evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longstraw.config import RunConfig
from longstraw.models.decoder import Block, Decoder
from longstraw.ops.kept import Kept
from longstraw.ops.past import BranchPast
from longstraw.parallel.fsdp import local_tensor
from longstraw.state import Carried, Past, RetainedState, Tensors
from longstraw.timing.meter import WorkMeter
from longstraw.timing.work import BlockKind


class SampledModel:
    """A model that evaluates the chunks, branches and blocks that can set a step's peak, and replaces the others.

    What is held grows from block to block, from chunk to chunk and not from branch to branch. So of blocks alike the
    ends are evaluated, which hold least and most. What replaces the rest allocates what stays of it: its output,
    its rows and, in the first backward, the gradients of its parameters.
    """

    def __init__(
        self,
        model: Decoder,
        blocks: Sequence[tuple[Block, bool]],
        chunks: Collection[int] | None,
        graphs: int,
        make_gradient: Callable[[nn.Parameter], object],
        made: dict[Any, Made] | None = None,
    ):
        """Evaluate of prompts the ``chunks`` that start there, and of ``blocks``, which are all in order, those marked.

        ``chunks`` None: all, and all graphs. ``graphs`` is how many hold the branches of a group, one after another.
        The first block of each kind must be marked; one that is not may be any of its kind. ``make_gradient`` allocates
        the gradient of a parameter of such a one. ``made`` is filled, and may be given again for later steps; while it
        is empty the first chunk must be evaluated.
        """
        self._model, self._chunks = model, chunks
        self._graphs = {0, 1, graphs - 1} if chunks is not None else range(graphs)
        self._graph = itertools.cycle(range(graphs))  # a verb has all of them or none
        made = {} if made is None else made
        self._blocks = [
            SampledBlock(block, evaluated, made.setdefault(signature(block), Made()), make_gradient)
            for block, evaluated in blocks
        ]
        model._blocks = lambda: self._blocks  # type: ignore[method-assign, assignment, return-value]
        self._work: WorkMeter | None = None

    def count_work(self, meter: WorkMeter) -> list[BlockKind]:
        """Let ``meter`` count by pieces and blocks from now on; return what each block has in common with others."""
        self._work = meter
        for i, block in enumerate(self._blocks):
            block.count_work(meter, i)
        keys = [signature(block._block) for block in self._blocks]
        sizes = [sum(p.nbytes for p in block._block.parameters()) for block in self._blocks]
        return [BlockKind(neighbours(keys, i), size) for i, size in enumerate(sizes)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_states(self, *arguments: Any, **keywords: Any) -> list[RetainedState]:
        states = self._model.new_states(*arguments, **keywords)
        for block, state in zip(self._blocks, states, strict=True):
            block.carried = isinstance(state, Carried)
        return states

    def __call__(
        self, tokens: Tensor, past: Sequence[Past], state_only: bool = False, segments: tuple[int, ...] = ()
    ) -> Any:
        if isinstance(past[0], BranchPast) or self._is_evaluated(past[0].positions, state_only):
            return self._model(tokens, past, state_only, segments)
        if self._work is not None:
            self._work.skip()
        chunk = self._model.split(len(tokens))
        count, width = chunk.stop - chunk.start, self._model.config.hidden_size
        if state_only:
            return None, [block.update(layer, count) for block, layer in zip(self._blocks, past, strict=True)]
        hidden = local_tensor(self._model.lm_head.weight.detach()).new_empty(count, width)
        return hidden.requires_grad_(torch.is_grad_enabled()), []

    def _is_evaluated(self, start: int, state_only: bool) -> bool:
        if state_only:
            return self._chunks is None or start in self._chunks
        return next(self._graph) in self._graphs


@dataclass
class Made:
    """The sizes of what a block makes, seen where one of its kind was evaluated."""

    rows: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)  # that a position adds, by name
    handed: tuple[tuple[int, ...], torch.dtype] | None = None  # a position of what it hands on; None: what it is handed
    kept: dict[str, list[tuple[torch.Size, torch.dtype]]] = field(default_factory=dict)  # by name, of one evaluation


class SampledBlock:
    """A block that is evaluated, or replaced by allocations of the same sizes."""

    def __init__(self, block: Block, evaluated: bool, made: Made, make_gradient: Callable[[nn.Parameter], object]):
        self._block, self._evaluated, self._made = block, evaluated, made
        self._parameters = [p for p in block.parameters() if p.requires_grad]
        self._make_gradient = make_gradient
        self.carried = False  # whether its state is a summary
        self._count: Callable[[], AbstractContextManager[None]] = nullcontext
        self._leave_out: Callable[[], AbstractContextManager[None]] = nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def count_work(self, meter: WorkMeter, number: int) -> None:
        """Let ``meter`` count this block as block ``number``, and nothing where it is stood in for."""
        self._count, self._leave_out = partial(meter.block, number), partial(meter.block, None)

    def __call__(self, x: Tensor, past: Past, handed: Any, state_only: bool) -> Any:
        begins = self._parameters and torch.is_grad_enabled() and not x.requires_grad  # a graph begins here
        if self._evaluated or begins:
            with self._count():
                result = self._block(x, past, handed, state_only)
            self._learn(result[1], result[2] if result[2] is not handed else None)
            if past.kept is not None and torch.is_grad_enabled():
                self._learn_kept(past.kept, result[2])
            return result
        with self._leave_out():
            return self._stand_in(x, past, handed)

    def _stand_in(self, x: Tensor, past: Past, handed: Any) -> Any:
        packed = past.chunk is not None and past.chunk.is_packed
        update = {} if self.carried and packed else self.update(past, len(x))
        update = {name: _KeepGradient.apply(x, rows) for name, rows in update.items()}
        if self._made.handed is not None:
            shape, dtype = self._made.handed
            handed = x.new_empty(past.chunk.count if past.chunk is not None else len(x), *shape, dtype=dtype)
        summary = [past[name] for name in self._made.rows] if self.carried else []
        if past.kept is not None:
            self._keep(past.kept, x.device)
        return _SameSize.apply(x, partial(self._passed, past.kept), *summary), update, handed

    def _keep(self, kept: Kept, device: torch.device) -> None:
        """Keep as much as an evaluation would."""
        for name, sizes in self._made.kept.items():
            kept.keep(name, tuple(torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes))

    def update(self, past: Past, count: int) -> Tensors:
        """Return an update of the right sizes; a summary's gradient passes through as if it had not changed."""
        rows, device = self._made.rows.items(), next(self._block.parameters()).device
        if self.carried:
            return {name: _SameSize.apply(past[name], None) for name, _ in rows}
        return {name: torch.empty(count, *shape, dtype=dtype, device=device) for name, (shape, dtype) in rows}

    def _learn(self, update: Tensors, handed: Any) -> None:
        if update:  # of several segments a summary has none
            self._made.rows = {name: (tuple(x.shape[1:]), x.dtype) for name, x in update.items()}
        if isinstance(handed, Tensor):
            self._made.handed = tuple(handed.shape[1:]), handed.dtype

    def _learn_kept(self, kept: Kept, handed: Any) -> None:
        """Note the sizes of what an evaluation kept, without what it hands on, which the next block holds anyway.

        A recomputation has taken what it found, and changes no note.
        """
        passed_on = handed.untyped_storage()._cdata if isinstance(handed, Tensor) else None
        if held := kept.held():
            self._made.kept = {
                name: [(x.shape, x.dtype) for x in results if x.untyped_storage()._cdata != passed_on]
                for name, results in held.items()
            }

    def _passed(self, kept: Kept | None) -> None:
        """Drop what was kept for a backward that has come here."""
        if kept is not None:
            kept.clear()
        self._gradients()

    def _gradients(self) -> None:
        """Allocate the gradients of the parameters, in the first backward that comes here."""
        with self._leave_out():
            for parameter in self._parameters:
                self._make_gradient(parameter)
        self._parameters = []


class _SameSize(torch.autograd.Function):
    """As much as ``x``, and as much of gradient on the way back, for what else was read too.

    ``x`` is kept, as a checkpoint keeps its input. ``passed`` is called in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None] | None, *read: Tensor) -> Tensor:
        ctx.save_for_backward(x, *read)
        ctx.passed = passed
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, *read = ctx.saved_tensors
        if ctx.passed is not None:
            ctx.passed()
        wanted = ctx.needs_input_grad[2:]
        return (
            torch.empty_like(grad),
            None,
            *(torch.empty_like(x) if w else None for x, w in zip(read, wanted, strict=True)),
        )


class _KeepGradient(torch.autograd.Function):
    """Rows computed from ``x``, so that their gradient is kept until the backward of their block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.summary = rows.requires_grad
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        return None, grad if ctx.summary else None


def graphs(config: RunConfig) -> int:
    """Return how many graphs one after another hold a group of responses of full length."""
    return -(-config.group_size // config.branches_together)


def sampled_chunks(config: RunConfig) -> set[int]:
    """Return where the chunks start that decide a step's peak, the first and the last two, and the second.

    From the second to the last but one the work of a chunk grows evenly: the first one has nothing before it.
    """
    starts = range(0, config.prompt_positions - 1, config.chunk)
    return {*starts[:2], *starts[-2:]}


def sampled_blocks(model: Decoder, sample: bool) -> list[tuple[Block, bool]]:
    """Return the blocks of ``model``, each with whether it is evaluated: all, or with ``sample`` those that decide."""
    blocks: list[Block] = list(model.model.layers)  # type: ignore[arg-type]
    kinds = [signature(block) for block in blocks]
    evaluated = ends(kinds) | {kinds.index(kind) for kind in kinds} if sample else set(range(len(blocks)))
    return [(block, i in evaluated) for i, block in enumerate(blocks)]


def signature(block: Block) -> tuple[Any, ...]:
    """Return what blocks of one kind have in common: names and shapes of their parameters, and which are trained."""
    return tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())


def ends(kinds: Sequence[Any]) -> set[int]:
    """Return the first and the last block of each kind between each two neighbours, and those neighbours."""
    places: dict[Any, list[int]] = {}
    for i in range(len(kinds)):
        places.setdefault(neighbours(kinds, i), []).append(i)
    ends = {end for found in places.values() for end in (found[0], found[-1])}
    return {i for end in ends for i in (end - 1, end, end + 1) if 0 <= i < len(kinds)}


def neighbours(kinds: Sequence[Any], i: int) -> tuple[Any, ...]:
    """Return the kinds of block ``i`` and of those beside it."""
    return tuple(kinds[j] if 0 <= j < len(kinds) else None for j in (i - 1, i, i + 1))
