"""The device mesh: the ranks of a job in groups that share a prompt, parameters or experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longstraw.errors import RankLostError, describe, status_of
from longstraw.ops.host_sync import read_counts
from longstraw.parallel.collectives import Group, labelled
from longstraw.parallel.parallel_dims import ParallelDims

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """All ranks in a row, the same ranks as (dp, cp), and as (replica, ep).

    Consecutive ranks share a prompt, so they are on one node if it has enough. Parameters are sharded over ``world``, a
    prompt's positions and the vocabulary over ``cp``, experts over ``ep``.
    """

    sizes: ParallelDims
    world: DeviceMesh
    dp: DeviceMesh
    cp: DeviceMesh
    replica: DeviceMesh  # the ranks that own the same experts
    ep: DeviceMesh
    context_group: dist.ProcessGroup  # the ranks of cp; NCCL runs collectives of one group one after the other
    expert_group: dist.ProcessGroup  # those of ep

    @property
    def dp_rank(self) -> int:
        """The number of this rank's prompt among the data-parallel ones."""
        return self.dp.get_local_rank()

    def context(self) -> Group:
        """Return the ranks that share this rank's prompt."""
        return Group(self.context_group)

    def agree(self, count: int) -> int:
        """Return the largest ``count`` over the data-parallel prompts: so many passes every rank must take part in."""
        if self.sizes.dp == 1:
            return count
        most = torch.tensor([count], device=self.world.device_type)
        with labelled("rounds"):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.dp.get_group())
        return read_counts(most, [count])[0]

    def decide(self, find: Callable[[], T]) -> T:
        """Return on all ranks of this rank's prompt what the first of them finds by ``find``, called there alone.

        What it raises there is raised there, and as ``RankLostError`` on the others.
        """
        group = self.cp.get_group()
        first = dist.get_global_rank(group, 0)
        answer: list[Any] = [None, None]  # what was found, or why nothing was
        raised: Exception | None = None
        if dist.get_rank() == first:
            try:
                answer[0] = find()
            except Exception as error:
                raised, answer[1] = error, (describe(error), status_of(error))
        dist.broadcast_object_list(answer, src=first, group=group)
        if raised is not None:
            raise raised
        if answer[1] is not None:
            raise RankLostError(first, "its host", f"failed: {answer[1][0]}", answer[1][1])
        found: T = answer[0]
        return found

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in their order."""
        values: list[Any] = [None] * self.sizes.world
        dist.all_gather_object(values, value)
        return values


def build_mesh(sizes: ParallelDims, device_type: str, timeout: timedelta | None = None) -> Mesh:
    """Return the mesh of the initialised process group; every rank must call it.

    Attention and experts have groups of their own, so that their collectives need not wait for those that gather
    parameters; ``timeout`` is theirs (None: PyTorch's).
    """
    world = init_device_mesh(device_type, (sizes.world,), mesh_dim_names=("world",))
    grid = init_device_mesh(device_type, (sizes.dp, sizes.cp), mesh_dim_names=("dp", "cp"))
    experts = init_device_mesh(device_type, (sizes.world // sizes.ep, sizes.ep), mesh_dim_names=("replica", "ep"))
    cp, ep = grid["cp"], experts["ep"]
    context, expert = (_own_group(part, sizes.world, timeout) for part in (cp, ep))
    return Mesh(sizes, world, grid["dp"], cp, experts["replica"], ep, context, expert)


def _own_group(part: DeviceMesh, world: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """Return the group of ``part``, a new one where it would be that of all ranks."""
    return dist.new_group(timeout=timeout) if 1 < part.size() == world else part.get_group()
