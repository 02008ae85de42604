"""Shard parameters over ranks: blocks by FSDP2 over all ranks; vocabulary and experts by rows, never gathered.

Gradients are summed over ranks, not averaged: each rank computes a part of the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from longstraw.parallel.collectives import labelled

# Some of what a block adds to the state are views. FSDP2 warns against changing views in place; these are only read.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


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


def total_norm(gradients: Iterable[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """Return the norm of all gradients over all ranks: 0-d, at least float32, alike everywhere.

    ``gradients`` are this rank's parts, each with its weight: 1 over the number of ranks that hold the same part.
    """
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).mul_(share**0.5)
        for gradient, share in gradients
    ]
    total = torch.stack(norms).square_().sum() if norms else torch.zeros((), device=device)
    if dist.is_initialized():
        with labelled("norm"):
            dist.all_reduce(total)
    return total.sqrt_()


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's part of a parameter's gradient."""
    return None if parameter.grad is None else local_tensor(parameter.grad)


def local_tensor(x: Tensor) -> Tensor:
    """Return this rank's part of ``x``; its gradient is that part's own."""
    return x.to_local() if isinstance(x, DTensor) else x


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return ``local``, a rank's part, as a DTensor like ``parameter``. It stays where it is, even in host memory."""
    if not isinstance(parameter, DTensor):
        return local
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # ``from_local`` would take it to the mesh's device
