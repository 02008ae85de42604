"""Expert parallelism: tokens are sent to the ranks that own their experts, and the results are sent back.

t tokens here, k experts a token, E experts of which E / W are here, N = t k entries sent, M entries received, d width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longstraw.ops.host_sync import read_counts, stated_counts
from longstraw.ops.moe import MoeOps, Routed, run_experts
from longstraw.parallel.collectives import labelled


class ExpertGroup:
    """The ranks that own the experts, an equal number each, in order of rank."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, ops: MoeOps) -> Tensor:
        """Return what ``ops.moe.mix_experts`` does for ``x`` [t, d]; the experts given are those of this rank."""
        number, k = len(down) * self.size, chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        token = order // k
        sent, arriving = self._counts(chosen, order, number)
        splits = [sum(sent[r * len(down) : (r + 1) * len(down)]) for r in range(self.size)], [sum(a) for a in arriving]
        with labelled("experts"):
            given = _Exchange.apply(x[token], self.group, *splits)
            share = _Exchange.apply(weights.flatten()[order], self.group, *splits)
        by_expert, per_expert = _sorted_by_expert(arriving, x.device)
        entries = torch.arange(len(by_expert), device=x.device)
        routed = Routed(entries, share[by_expert], per_expert)
        made = run_experts(given[by_expert], routed, gate_up, down, ops=ops)
        back = torch.empty_like(by_expert).scatter_(0, by_expert, entries)
        with labelled("experts"):
            returned = _Exchange.apply(made[back], self.group, *splits[::-1])
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        inner = torch.promote_types(x.dtype, torch.float32)
        # Summed in the order of the choice: index_add adds in no fixed order on CUDA.
        return returned.index_select(0, place).view(len(x), k, x.shape[1]).sum(1, dtype=inner).to(x.dtype)

    def _counts(self, chosen: Tensor, order: Tensor, number: int) -> tuple[list[int], list[list[int]]]:
        """Return how many entries go to each expert, [E], and arrive from each rank for each one here, [W][E / W].

        ``order`` sorts the entries by expert. The host reads both at once.
        """
        ends = torch.searchsorted(chosen.flatten()[order], torch.arange(number, device=order.device), right=True)
        mine = torch.cat([ends[:1], ends.diff()])
        received = torch.empty_like(mine)
        with labelled("experts"):
            dist.all_to_all_single(received, mine, group=self.group)
        own, stated = number // self.size, stated_counts(chosen, number)
        here = slice(self.rank * own, (self.rank + 1) * own)
        values = read_counts(torch.cat([mine, received]), [*stated, *stated[here] * self.size])
        return values[:number], [values[number + r * own : number + (r + 1) * own] for r in range(self.size)]


class _Exchange(torch.autograd.Function):
    """Send pieces of the given sizes to the ranks, and the gradient back. A rank may send or get nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with labelled("experts"):
            return _exchange(grad, ctx.group, ctx.received, ctx.sent), None, None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def _sorted_by_expert(arriving: list[list[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the order that sorts received entries by expert, and how many each expert gets."""
    per_expert = [sum(column) for column in zip(*arriving, strict=True)]
    flat = torch.tensor([count for line in arriving for count in line], device=device)
    experts = torch.arange(len(per_expert), device=device).repeat(len(arriving))
    experts = experts.repeat_interleave(flat, output_size=sum(per_expert))
    return experts.argsort(stable=True), per_expert
