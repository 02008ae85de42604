"""A model that is evaluated where a step's peak is decided and stood in for elsewhere, so that a step takes minutes.

Of chunks the first two and the last two are evaluated, of branches the first two and the last one. Between them sizes
are affine in a chunk's start, so none is larger than both ends. Blocks of one kind hold alike, but for what the blocks
before them have left, which grows: those at both ends are evaluated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longstraw.config import RunConfig
from longstraw.models.decoder import Block, Decoder
from longstraw.state import Carried, Past, RetainedState, Tensors


class SampledModel:
    """A model that evaluates the chunks, branches and blocks that decide a step's peak, and stands in for the others.

    What is held grows from block to block, from chunk to chunk and not from branch to branch. So the first chunk and
    branch are evaluated whole, for what they make; of the next and the last the blocks at both ends are, which hold
    least and most. What stands in for the rest allocates what stays of it.
    """

    def __init__(self, model: Decoder, config: RunConfig, *, blocks: bool = True):
        """``blocks``: stand in for blocks too."""
        starts = range(0, config.prompt_positions - 1, config.chunk)
        self._model = model
        self._chunks = {*starts[:2], *starts[-2:]}
        self._branches = {0, 1, config.group_size - 1}
        self._branch = itertools.cycle(range(config.group_size))  # a verb has all of them or none
        self._seen: set[str] = set()
        self._carried: list[bool] = []
        self._rows: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = []  # what a position adds to each state
        own = model._blocks()
        ends = _ends([_signature(block) for block in own]) if blocks else set(range(len(own)))
        self._blocks = [SampledBlock(block, i in ends) for i, block in enumerate(own)]
        model._blocks = lambda: self._blocks  # type: ignore[method-assign, assignment, return-value]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_states(self, *arguments: Any, **keywords: Any) -> list[RetainedState]:
        states = self._model.new_states(*arguments, **keywords)
        self._carried = [isinstance(state, Carried) for state in states]
        return states

    def __call__(self, tokens: Tensor, past: Sequence[Past], state_only: bool = False) -> Any:
        verb = f"{state_only} {torch.is_grad_enabled()}"
        if not self._is_evaluated(past[0].positions, state_only):
            chunk = self._model.split(len(tokens))
            count, width = chunk.stop - chunk.start, self._model.config.hidden_size
            if state_only:
                return None, [self._update(i, layer, count) for i, layer in enumerate(past)]
            hidden = self._new(self._model.lm_head.weight.dtype, count, width)
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
            return {name: _SameSize.apply(past[name]) for name, _ in rows}
        return {name: self._new(dtype, count, *shape) for name, (shape, dtype) in rows}

    def _new(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._model.lm_head.weight.device)


class SampledBlock:
    """A block that is evaluated, or stood in for where it is not at an end and ``update`` says what it would add."""

    def __init__(self, block: Block, at_end: bool):
        self._block, self._at_end = block, at_end
        self._trained = any(p.requires_grad for p in block.parameters())
        self._hands: Callable[[Any, int], Any] = lambda handed, count: handed
        self.update: Callable[[Past, int], Tensors] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __call__(self, x: Tensor, past: Past, handed: Any, state_only: bool) -> Any:
        begins = self._trained and torch.is_grad_enabled() and not x.requires_grad  # a graph begins here
        if self._at_end or self.update is None or begins:
            result = self._block(x, past, handed, state_only)
            if isinstance(result[2], Tensor) and result[2] is not handed:
                self._hands = partial(_new, tuple(result[2].shape[1:]), result[2].dtype, result[2].device)
            return result
        update = {name: _KeepGradient.apply(x, rows) for name, rows in self.update(past, len(x)).items()}
        return _SameSize.apply(x), update, self._hands(handed, past.chunk.count if past.chunk is not None else len(x))


class _SameSize(torch.autograd.Function):
    """As much as its input, and as much of gradient on the way back; the input is kept, as a checkpoint keeps one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        return torch.empty_like(grad)


class _KeepGradient(torch.autograd.Function):
    """Rows that are made of ``x``, so that what they are owed is carried as far as their block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.summary = rows.requires_grad
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        return None, grad if ctx.summary else None


def _new(row: tuple[int, ...], dtype: torch.dtype, device: torch.device, handed: Any, count: int) -> Tensor:
    return torch.empty(count, *row, dtype=dtype, device=device)


def _signature(block: Block) -> tuple[Any, ...]:
    return tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())


def _ends(kinds: Sequence[Any]) -> set[int]:
    """Return the first and the last block of each kind between each two neighbours, and those neighbours."""
    places: dict[Any, list[int]] = {}
    for i in range(len(kinds)):
        places.setdefault(_neighbours(kinds, i), []).append(i)
    ends = {end for found in places.values() for end in (found[0], found[-1])}
    return {i for end in ends for i in (end - 1, end, end + 1) if 0 <= i < len(kinds)}


def _neighbours(kinds: Sequence[Any], i: int) -> tuple[Any, ...]:
    return tuple(kinds[j] if 0 <= j < len(kinds) else None for j in (i - 1, i, i + 1))
