"""Build a model sharded over ranks, and gather it for saving, without holding all of it on a device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from longstraw.config import AdapterConfig, ModelConfig
from longstraw.models import build_model, draw_weights
from longstraw.models.decoder import Decoder
from longstraw.models.hf_weights import load_weights
from longstraw.models.lora import add_adapter, fill_adapter
from longstraw.parallel.fsdp import local_tensor
from longstraw.parallel.mesh import Mesh
from longstraw.parallel.parallelize import Parallel, parallelize


def build_sharded(
    config: ModelConfig,
    adapter: AdapterConfig,
    mesh: Mesh,
    *,
    seed: int,
    device: torch.device,
) -> Parallel:
    """Return a model spread over ``mesh``, with weights from its checkpoint or drawn from ``seed``.

    The weights equal those of one process. Random ones are drawn a module at a time and a rank keeps its part, of the
    experts it draws only its own; of a checkpoint's files a rank reads only its part.
    """
    model = add_adapter(build_model(config, device="meta", backend=device.type), adapter)
    parallel = parallelize(model, mesh)
    model.to_empty(device=device)
    if config.checkpoint is None:
        draw_weights(model, seed=seed, keep=_keep, rows=_own_rows)
    else:
        dtype = getattr(torch, config.dtype)
        load_weights(model, config.checkpoint, dtype=dtype, device=device, place=lambda _, tensor: own_part(tensor))
    if adapter.name != "none":
        fill_adapter(model, adapter, seed=seed, keep=_keep)
    return parallel


def gather_model(parallel: Parallel, adapter: AdapterConfig) -> Decoder | None:
    """Return the model in rank 0's host memory, as one process would have it, for saving; None on other ranks.

    Every rank takes part, one tensor at a time. Of a model with adapters only those are gathered: the rest, which has
    not changed, stays on the meta device.
    """
    adapted = adapter.name != "none"
    state = {}
    first = parallel.mesh.world.get_local_rank() == 0
    for name, tensor in parallel.model.state_dict().items():
        if adapted and ".lora_" not in name:
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            state[name] = whole.detach().to("cpu")
        del whole
    if not first:
        return None
    model = add_adapter(build_model(parallel.model.config, device="meta"), adapter)
    model.load_state_dict(state, assign=True, strict=not adapted)
    return model


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a model's tensor, to be filled where it is, and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local_tensor(tensor.detach()), tuple(offset)


def _own_rows(tensor: Tensor) -> range:
    """Return which rows of a stack this rank has."""
    part, offset = own_part(tensor)
    return range(offset[0], offset[0] + len(part))


def _keep(tensor: Tensor, drawn: Tensor, first: int = 0) -> Tensor:
    """Copy this rank's part of a model's tensor from ``drawn``, which has its rows from ``first`` on."""
    part, offset = own_part(tensor)
    offset = (offset[0] - first, *offset[1:]) if offset else offset
    box = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
    part.copy_(drawn[box])
    return tensor
