"""Count the work of a step's operations while it runs, or is simulated, by verb, piece and block.

An operation takes as long as its arithmetic at the rate of its kind, or as its bytes at the memory's, whichever is
longer; a collective as long as its bytes at the links'. Rates are given, so no time is measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.config import HardwareConfig
from longstraw.memory.fake_depth import FakeDepth
from longstraw.parallel.collectives import UNLABELLED, current_label
from longstraw.parallel.comm_meter import Message, message_of
from longstraw.timing.costs import RESOURCE_OF, bytes_of, flops_of
from longstraw.timing.work import Piece, Work

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
Sums = defaultdict[str, float]  # by the names of ``Work``


class WorkMeter(TorchDispatchMode):
    """Count work while entered; ``verbs`` holds the pieces of each verb in order. ``hardware.rates`` must be known.

    A backward belongs to the block that was evaluated again last. What FSDP gathers and reduces is hidden beside
    computation; it and its copies belong to the piece's parameters. All other collectives are waited for.
    """

    def __init__(self, hardware: HardwareConfig):
        super().__init__()
        if not hardware.rates.known:
            missing = ", ".join(name for name, value in vars(hardware.rates).items() if value is None)
            raise ValueError(f"hardware.rates has no value for {missing}")
        self._hardware, self._rates = hardware, vars(hardware.rates)
        self._now = Sums(float)  # of the block, or the rest, that is running
        self._depth = FakeDepth()
        self.reset()

    def __enter__(self) -> WorkMeter:
        self._depth = FakeDepth()
        super().__enter__()
        return self

    def reset(self) -> None:
        """Start anew from nothing."""
        self.verbs: dict[str, list[Piece]] = {}
        self._pieces: list[Piece] | None = None  # of the verb that runs
        self._start_piece()

    @contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """Count this block's work for the verb ``name``, where no other one is running."""
        if self._pieces is not None:
            yield
            return
        self._pieces = self.verbs.setdefault(name, [])
        self._start_piece()
        try:
            yield
        finally:
            if self._began:
                self.advance()
            self._pieces = None

    def advance(self) -> None:
        """Note that a piece has ended."""
        assert self._pieces is not None
        blocks = {i: Work(**sums) for i, sums in self._blocks.items()}
        self._pieces.append(Piece(self._evaluated, blocks, Work(**self._parameters), Work(**self._rest)))
        self._start_piece()

    def skip(self) -> None:
        """Note that the piece that runs is not evaluated: its work is that of those around it."""
        self._evaluated = False

    @contextmanager
    def block(self, number: int | None) -> Iterator[None]:
        """Count what is done in here for block ``number`` (None: nowhere), and in a backward all until the next one."""
        before = self._now
        self._now = Sums(float) if number is None else self._blocks.setdefault(number, Sums(float))
        try:
            yield
        finally:
            if torch._C._current_graph_task_id() == -1:
                self._now = before

    def _start_piece(self) -> None:
        self._evaluated, self._began = True, False
        self._blocks: dict[int, Sums] = {}
        self._parameters = Sums(float)
        self._rest = Sums(float)
        self._now = self._rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for cls in types:
            if hasattr(cls, "__tensor_flatten__"):  # a wrapper (DTensor): it runs, its inner operations come here
                return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._pieces is not None and func.namespace != "prim" and not self._depth.deeper:
            self._began = True
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        work = self._now
        work["launches"] += self._rates["operation_us"] * MICRO
        message = message_of(func, args, kwargs)
        if message is not None:
            by_fsdp = current_label() == UNLABELLED
            target, name = (self._parameters, "hidden") if by_fsdp else (work, "links")
            target[name] += link_seconds(message, self._hardware)
            return
        moved = bytes_of(func, args, kwargs, out) / (self._rates["memory"] * TERA)
        if func.namespace == "fsdp":
            self._parameters["memory"] += moved
            return
        flops, rate = flops_of(func, args, kwargs, out)
        computed = flops / (self._rates[rate] * TERA)
        work["flops"] += flops
        work[RESOURCE_OF[rate] if computed >= moved else "memory"] += max(computed, moved)


def link_seconds(message: Message, hardware: HardwareConfig) -> float:
    """Return how long a collective sends, without its latency.

    A ring over several nodes enters and leaves each at every adapter, so it is as slow as a rank's link, or as the
    adapters of a node's ranks together. All to all, what goes to other nodes takes a rank's own adapter.
    """
    rates = hardware.rates
    assert rates.links is not None
    assert rates.links_across is not None
    ranks = dist.get_process_group_ranks(message.group)
    own = dist.get_rank() // max(hardware.gpus_per_node, 1)
    here = sum(rank // max(hardware.gpus_per_node, 1) == own for rank in ranks)
    if here == len(ranks):
        return message.size / (rates.links * GIGA)
    if message.collective != "all_to_all":
        return message.size / (min(rates.links, here * rates.links_across) * GIGA)
    outside = message.size * (len(ranks) - here) / (len(ranks) - 1)
    return max((message.size - outside) / (rates.links * GIGA), outside / (rates.links_across * GIGA))
