"""Parameters spread over ranks: blocks by FSDP2 over all of them, vocabulary and experts by rows that stay put.

Gradients are sums over ranks, never means: each rank's is its own part of a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard


def keep_rows(module: nn.Module, names: Iterable[str], mesh: DeviceMesh) -> None:
    """Let this rank keep only its rows of ``module``'s parameters ``names``, as ``torch.chunk`` cuts them."""
    for name in names:
        whole = getattr(module, name)
        size = -(-len(whole) // mesh.size())
        first = size * mesh.get_local_rank()
        rows = whole.detach()[first : first + size].clone()
        spread = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        setattr(module, name, nn.Parameter(spread, requires_grad=whole.requires_grad))


def shard_module(module: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Spread the parameters of ``module`` over ``mesh``, gathered for each call, all but ``ignored``.

    Gradients are reduced in at least float32. Inputs stay as they are: state that is handed through must not be cast.
    """
    dtypes = {p.dtype for p in module.parameters() if p not in ignored}
    reduce = torch.promote_types(next(iter(dtypes)), torch.float32) if dtypes else None
    policy = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=ignored)


def sum_gradients(model: nn.Module) -> None:
    """Make every FSDP module of ``model`` reduce gradients to sums; by default they would be means."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def total_norm(parameters: Iterable[nn.Parameter], counted: dict[int, float]) -> Tensor:
    """Return the norm of all gradients over all ranks; 0-d, alike everywhere.

    ``counted`` is what a parameter's local part counts, by ``id``, where several ranks hold the same one: 1 over their
    number; 1 where it is not in there.
    """
    squares = [
        local_tensor(p.grad).to(torch.promote_types(p.dtype, torch.float32)).square().sum() * counted.get(id(p), 1.0)
        for p in parameters
        if p.grad is not None
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    dist.all_reduce(total)
    return total.sqrt()


def local_tensor(x: Tensor) -> Tensor:
    """Return this rank's part of ``x``."""
    return x.to_local() if isinstance(x, DTensor) else x
