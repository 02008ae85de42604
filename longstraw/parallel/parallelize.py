"""Apply parallelism to a finished model: shard its parameters and replace its context ops. Models have no rank code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longstraw.config import ConfigError
from longstraw.layers.feedforward import Experts
from longstraw.models.decoder import Decoder
from longstraw.parallel.collectives import labelled
from longstraw.parallel.context_parallel import ContextParallel
from longstraw.parallel.expert_parallel import ExpertGroup
from longstraw.parallel.fsdp import keep_rows, local_gradient, shard_module, sum_gradients
from longstraw.parallel.mesh import Mesh

VOCABULARY = ("model.embed_tokens", "lm_head")


@dataclass
class Parallel:
    """A model that is sharded over ``mesh``, and how its gradients are completed at the end of a step."""

    model: Decoder
    mesh: Mesh
    replicated: dict[int, dist.ProcessGroup] = field(
        default_factory=dict
    )  # by parameter id: the ranks that hold the same part

    def finish_gradients(self, gradient_of: Callable[[nn.Parameter], Tensor | None] = local_gradient) -> None:
        """Complete the gradients after the last backward: sum those of parameters that several ranks hold.

        Over data-parallel prompts they are averaged. ``gradient_of`` returns this rank's part of a parameter's
        gradient, which is changed in place, or None; ranks that hold the same part must all have one or none.
        """
        for parameter in self.model.parameters():
            gradient = gradient_of(parameter)
            if gradient is None:
                continue
            if id(parameter) in self.replicated:
                wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                with labelled("gradients"):
                    dist.all_reduce(wide, group=self.replicated[id(parameter)])
                if wide is not gradient:
                    gradient.copy_(wide)
            if self.mesh.sizes.dp > 1:
                gradient /= self.mesh.sizes.dp

    def share(self, parameter: nn.Parameter) -> float:
        """Return the weight of this rank's ``parameter`` in a sum over ranks: 1 over the number that hold it."""
        group = self.replicated.get(id(parameter))
        return 1.0 if group is None else 1 / dist.get_world_size(group)


def parallelize(model: Decoder, mesh: Mesh) -> Parallel:
    """Shard ``model``, the same on every rank, over ``mesh``: positions, state, parameters and gradients.

    Blocks are sharded over all ranks and gathered one at a time, vocabulary and experts are sharded by rows and never
    gathered. The model may already have adapters and frozen weights. Raises ``ConfigError`` for adapters on the
    vocabulary, which is not gathered.
    """
    group, parallel = mesh.context(), Parallel(model, mesh)
    for name in VOCABULARY:
        if hasattr(model.get_submodule(name), "lora_A"):
            raise ConfigError(f"an adapter on {name} cannot be spread over ranks; leave it out of adapter.targets")
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    context = ContextParallel(model.ops, group, ExpertGroup(mesh.expert_group))
    ops = model.ops._replace(context=context)
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = ops  # type: ignore[assignment]
    model.split, model.agree = group.split, mesh.agree
    stays: set[nn.Parameter] = set()
    for module in map(model.get_submodule, VOCABULARY):
        if not module._parameters:  # a tied head has no weight of its own
            continue
        keep_rows(module, ["weight"], mesh.cp)
        weight = module.get_parameter("weight")
        stays.add(weight)
        if mesh.sizes.dp > 1:
            parallel.replicated[id(weight)] = mesh.dp.get_group()
    for module in experts:
        keep_rows(module, ["gate_up_proj", "down_proj"], mesh.ep)
        stays.update(module.parameters())
        if mesh.replica.size() > 1:
            for parameter in module.parameters():
                parallel.replicated[id(parameter)] = mesh.replica.get_group()
    for block in model.model.layers:
        shard_module(block, mesh.world, stays & set(block.parameters()))
    shard_module(model, mesh.world, stays)
    sum_gradients(model)
    return parallel
