"""Collectives over the ranks that share a chunk, for any number of positions, with labels for the bytes they send.

Positions of a chunk are spread evenly: rank r of W has [n r // W, n (r + 1) // W) of n. A rank without positions takes
part in every collective. Collectives need equal pieces, so pieces are padded to the longest and the padding removed.

W ranks, n positions of a chunk, t of them here, m = ceil(n / W).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longstraw.ops.chunk import Chunk

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in PyTorch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

UNLABELLED = "other"
_label = UNLABELLED


@contextmanager
def labelled(name: str) -> Iterator[None]:
    """Count bytes sent in this block under ``name``."""
    global _label
    before, _label = _label, name
    try:
        yield
    finally:
        _label = before


def current_label() -> str:
    """Return the label under which bytes are counted now."""
    return _label


class Group:
    """The ranks that share a chunk's positions; ``rank`` is this one's place among them."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def borders(self, count: int) -> list[int]:
        """Return where the pieces of ``count`` positions begin, and the end."""
        return [count * rank // self.size for rank in range(self.size + 1)]

    def split(self, count: int) -> Chunk:
        """Return which of ``count`` positions are this rank's."""
        return Chunk(count, count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def all_gather(self, x: Tensor, count: int) -> Tensor:
        """Return [n, ...] of all ranks from this rank's ``x`` [t, ...]."""
        longest = self._longest(count)
        gathered = x.new_empty(self.size * longest, *x.shape[1:])
        _all_gather(gathered, _padded(x, longest), group=self.group)
        return self._without_padding(gathered, count)

    def reduce_scatter(self, x: Tensor, count: int) -> Tensor:
        """Return this rank's [t, ...] of the sum of all ranks' ``x`` [n, ...]."""
        longest, own = self._longest(count), self.split(count)
        reduced = x.new_empty(longest, *x.shape[1:])
        _reduce_scatter(reduced, self._with_padding(x, count), group=self.group)
        return reduced[: own.stop - own.start]

    def gather_heads(self, x: Tensor, count: int) -> Tensor:
        """Exchange ``x`` [t, W, C], a column of C a rank, for [n, C]: all positions of this rank's column."""
        sent = _padded(x, self._longest(count)).transpose(0, 1).contiguous()  # [W, m, C]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return self._without_padding(received.flatten(0, 1), count)

    def gather_positions(self, x: Tensor, count: int) -> Tensor:
        """Exchange ``x`` [n, C], this rank's column, for [t, W, C]: all columns of this rank's positions."""
        own = self.split(count)
        sent = self._with_padding(x, count)  # [W m, C]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        columns = received.unflatten(0, (self.size, -1)).transpose(0, 1)
        return columns[: own.stop - own.start].contiguous()

    def stack(self, x: Tensor) -> Tensor:
        """Return [W, ...]: every rank's ``x``, which has the same shape everywhere."""
        gathered = x.new_empty(self.size, *x.shape)
        _all_gather(gathered.flatten(0, 1) if x.dim() else gathered, x.contiguous(), group=self.group)
        return gathered

    def _longest(self, count: int) -> int:
        return max(-(-count // self.size), 1)  # not all backends can send nothing

    def _without_padding(self, x: Tensor, count: int) -> Tensor:
        """Remove the padding from ``x`` [W m, ...]."""
        longest = self._longest(count)
        if count == len(x):
            return x
        pieces = pairwise(self.borders(count))
        return torch.cat([x[r * longest : r * longest + stop - start] for r, (start, stop) in enumerate(pieces)])

    def _with_padding(self, x: Tensor, count: int) -> Tensor:
        """Insert the padding into ``x`` [n, ...]; contiguous [W m, ...]."""
        longest = self._longest(count)
        if count == self.size * longest:
            return x.contiguous()
        opened = x.new_zeros(self.size * longest, *x.shape[1:])
        for rank, (start, stop) in enumerate(pairwise(self.borders(count))):
            opened[rank * longest : rank * longest + stop - start] = x[start:stop]
        return opened


class GatherHeads(torch.autograd.Function):
    """[t, W, C] -> [n, C], and back with the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int) -> Tensor:
        ctx.group, ctx.count = group, count
        return group.gather_heads(x, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with labelled("heads"):
            return ctx.group.gather_positions(grad, ctx.count), None, None


class GatherPositions(torch.autograd.Function):
    """[n, C] -> [t, W, C], and back with the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int) -> Tensor:
        ctx.group, ctx.count = group, count
        return group.gather_positions(x, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with labelled("heads"):
            return ctx.group.gather_heads(grad, ctx.count), None, None


def _padded(x: Tensor, length: int) -> Tensor:
    """Return ``x`` [t, ...] with zeros up to ``length``, contiguous."""
    if len(x) == length:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(length - len(x), *x.shape[1:])])
