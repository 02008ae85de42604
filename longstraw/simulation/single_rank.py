"""One process that plays one rank of many: what ``mode=simulate`` and ``mode=emulate`` share.

The process group sends nothing and the other ranks are taken to be as the played one. What would come from them is
uninitialised memory, so no result means anything; what is allocated, and on a GPU how long it takes, does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longstraw.config import RunConfig
from longstraw.data.task import Example
from longstraw.group import Group
from longstraw.observer import Observer
from longstraw.ops.host_offload import to_host
from longstraw.ops.host_sync import use_stated_counts
from longstraw.parallel.mesh import Mesh, build_mesh
from longstraw.parallel.parallel_dims import resolve_dims
from longstraw.rollout.group import Policy, Request, Rollout, Source, sampling_of
from longstraw.rollout.sampling import draw_together
from longstraw.simulation.sampled_model import SampledModel, graphs, sampled_blocks, sampled_chunks
from longstraw.timing.meter import WorkMeter
from longstraw.timing.work import BlockKind
from longstraw.training.trainer import Trainer

T = TypeVar("T")
TIMES = ("seconds", "seconds_by_verb")  # where work was left out they are not the step's


def sample_model(trainer: Trainer, *, blocks: bool, work: WorkMeter | None = None) -> list[BlockKind]:
    """Let only what decides a step's peak be evaluated, blocks too if asked, unless ``simulation.every`` is set.

    With ``work``, let it count by pieces and blocks, and return the kinds of blocks.
    """
    every, kinds = trainer.config.simulation.every, []
    if every and work is None:
        return []
    make_gradient = trainer.optimizer.make_gradient
    for name in ("reference", "model"):
        if (model := getattr(trainer, name)) is not None:
            chosen = sampled_blocks(model, blocks and not every), None if every else sampled_chunks(trainer.config)
            sampled = SampledModel(model, *chosen, graphs(trainer.config), make_gradient)
            setattr(trainer, name, sampled)
            if work is not None:
                kinds = sampled.count_work(work)
    return kinds


def simulated_source(config: RunConfig) -> Source | None:
    """Return where a simulated run's responses come from; None: from the task."""
    return draw_held if config.rollout == "sample" else None


class SingleRankMesh(Mesh):
    """A mesh of which one rank is there."""

    def decide(self, find: Callable[[], T]) -> T:
        return find()

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.sizes.world


@contextmanager
def fake_rank(config: RunConfig, device_type: str) -> Iterator[SingleRankMesh | None]:
    """Enter as one rank of ``config.hardware``, which hears nothing; yield its mesh, None where it is alone."""
    world, rank = config.hardware.world_size, config.simulation.rank
    with use_stated_counts(expert_token_counts(config)):
        if world == 1:
            yield None
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield SingleRankMesh(**vars(build_mesh(resolve_dims(config.model, config.hardware), device_type)))
        finally:
            dist.destroy_process_group()


class RandomTask:
    """The same group for every step: random tokens, all responses as long as they may be; rewards alternate."""

    def __init__(self, config: RunConfig, ready: Callable[[Tensor], Tensor] = lambda ids: ids):
        """``ready`` is what makes of token ids what the step gets."""
        self.description: dict[str, Any] = {"name": "played"}
        generator = torch.Generator().manual_seed(config.seed)

        def draw(count: int) -> Tensor:
            return torch.randint(config.model.vocab_size, (count,), generator=generator)

        group = Group(
            draw(config.prompt_positions),
            [draw(config.response_length) for _ in range(config.group_size)],
            self._rewards(config.group_size),
        )
        group.prompt, group.responses = ready(group.prompt), [ready(ids) for ids in group.responses]
        self._group = group

    def group(self, step: int) -> Group:
        return self._group

    def example(self, number: int, split: str = "train") -> Example:
        return Example(self._group.prompt, "played")  # type: ignore[arg-type] # a step takes tensors too

    def reward(self, example: Example, responses: Sequence[Any]) -> list[float | None]:
        return [*self._rewards(len(responses))]

    def golden(self, example: Example) -> Any:
        return self._group.responses[0].numpy()

    @staticmethod
    def _rewards(count: int) -> list[float]:
        return [float(i % 2) for i in range(count)]


def draw_held(policy: Policy, request: Request, observer: Observer) -> Rollout:
    """Hold what drawing a group holds, and return the group of the task, a ``RandomTask``.

    Of the responses that are drawn together the first and the last token are evaluated, which hold least and most; with
    ``simulation.every`` all tokens of all responses. No response ends before it is as long as it may be.
    """
    config, sampling = request.config, replace(sampling_of(request.config), stop=())
    size, every = config.drawn_together, config.simulation.every
    tokens = range(config.response_length) if every else sorted({0, config.response_length - 1})
    with observer.verb("sample", size * len(tokens)), torch.no_grad():
        for _ in range(0, config.group_size if every else 1, size):
            drawn = draw_together(policy.model, policy.retained, range(size), sampling, tokens, observer=observer)
    group = copy.copy(request.task.group(request.step))
    old = drawn.logprobs
    group.prompt = request.prompt
    group.old_logprobs = [old[i] if i < len(old) else to_host(old[0]) for i in range(config.group_size)]
    return Rollout(group, (config.response_length,) * config.group_size)


def expert_token_counts(config: RunConfig) -> Callable[[Tensor, int], list[int]]:
    """Return what states how many tokens go to each expert: those of this rank get ``imbalance`` times their share."""
    ep, chosen = resolve_dims(config.model, config.hardware).ep, config.simulation

    def state(places: Tensor, number: int) -> list[int]:
        total, own = places.numel(), number // ep
        if ep == 1 or number % ep:
            return _evenly(total, number)
        first = own * (chosen.rank % ep)
        here = min(round(total / ep * chosen.imbalance), total)
        others = _evenly(total - here, number - own)
        return [*others[:first], *_evenly(here, own), *others[first:]]

    return state


def _evenly(total: int, places: int) -> list[int]:
    return [total // places + (place < total % places) for place in range(places)]
