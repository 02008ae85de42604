"""Accumulate gradients, clip their norm and update the parameters, on one rank or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longstraw.config import OptimizerConfig
from longstraw.ops.host_offload import host_empty
from longstraw.ops.host_sync import read_scalar
from longstraw.parallel.fsdp import like, local_tensor, total_norm
from longstraw.parallel.parallelize import Parallel


class Optimizer:
    """The trained parameters, their accumulated gradients and the optimizer.

    A step adds hundreds of gradients, one a branch and one a chunk. In bfloat16 the small ones would be lost, so they
    are accumulated in float32 buffers, unless ``gradient_dtype`` is ``model``. With ``device`` ``cpu`` copies of the
    parameters are updated in host memory, where the optimizer's state is, and copied back.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: OptimizerConfig,
        parallel: Parallel | None = None,
        *,
        note: Callable[[str, Any], object] = lambda kind, tensors: None,
    ):
        """``note`` is called with new ``gradients``, and with the state of the ``optimizer`` after a step."""
        self.parameters, self.config, self.parallel, self._note = list(parameters), config, parallel, note
        self._sums: dict[int, Tensor] = {}  # float32 sums by a parameter's id, this rank's part
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._add if self.is_summed(parameter) else self._made)
        self.updated = self.parameters if config.device is None else [_host_copy(p) for p in self.parameters]
        self.optimizer = _adamw(self.updated, config) if config.name == "adamw" else None
        if self.optimizer is not None and config.device is not None:
            for updated in self.updated:
                self.optimizer.state[updated] = _host_state(updated)

    def update(self, loss: Tensor, scale: float = 1.0) -> float:
        """Scale and clip the gradients, update the parameters and drop the gradients; return the norm before clipping.

        If the loss or the norm is not finite the parameters stay as they were.
        """
        if self.parallel is not None:
            self.parallel.finish_gradients(self._gradient)
        if scale != 1:
            for gradient in self.gradients():
                gradient.mul_(scale)
        share = self.parallel.share if self.parallel is not None else lambda _: 1.0
        there = [(parameter, self._gradient(parameter)) for parameter in self.parameters]
        norm = total_norm(((g, share(p)) for p, g in there if g is not None), self.parameters[0].device)
        if self._all(norm.isfinite() & loss.isfinite()) and self.optimizer is not None:
            if self.config.max_grad_norm is not None:
                clip = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch clips
                for gradient in self.gradients():
                    gradient.mul_(clip)
            del there
            self._step()
        for parameter in self.parameters:
            parameter.grad = None
        self._sums.clear()
        return read_scalar(norm, 0.0)

    def make_state(self) -> None:
        """Allocate the optimizer's state, as the first step does, by a step with gradients of 0."""
        if self.optimizer is not None:
            for updated in self.updated:
                updated.grad = torch.zeros_like(updated)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._note("optimizer", self.state())

    def drop_state(self) -> None:
        """Drop the state that ``make_state`` allocated."""
        if self.optimizer is not None and self.config.device is None:
            self.optimizer.state.clear()

    def make_gradient(self, parameter: nn.Parameter) -> None:
        """Allocate a gradient of ``parameter`` as a backward would, with no values."""
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
        (self._add if self.is_summed(parameter) else self._made)(parameter)

    def gradients(self) -> Iterator[Tensor]:
        """Yield this rank's part of every gradient."""
        for parameter in self.parameters:
            gradient = self._gradient(parameter)
            if gradient is not None:
                yield gradient

    def state(self) -> list[Tensor]:
        """Return the optimizer's own tensors, this rank's part of each."""
        if self.optimizer is None:
            return []
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return [local_tensor(value) for value in values if isinstance(value, Tensor)]

    def own(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return what is kept for one parameter: the optimizer's state and, where it is updated there, its copy."""
        updated = self.updated[next(i for i, p in enumerate(self.parameters) if p is parameter)]
        state = [] if self.optimizer is None else list(self.optimizer.state[updated].values())
        return state if updated is parameter else [updated, *state]

    def _step(self) -> None:
        """Run the optimizer with gradients in the parameters' dtype, each freed after the step."""
        assert self.optimizer is not None
        for parameter, updated in zip(self.parameters, self.updated, strict=True):
            gradient = self._gradient(parameter)
            parameter.grad = None
            self._sums.pop(id(parameter), None)
            if gradient is not None:
                if updated is parameter:
                    gradient = gradient.to(updated.dtype)
                    self._note("gradients", gradient)
                else:
                    gradient = host_empty(gradient.shape, updated.dtype).copy_(gradient)
                updated.grad = like(updated, gradient)
        self.optimizer.step()
        self._note("optimizer", self.state())
        self.optimizer.zero_grad()
        if self.updated is not self.parameters:
            with torch.no_grad():
                for parameter, updated in zip(self.parameters, self.updated, strict=True):
                    local_tensor(parameter).copy_(local_tensor(updated), non_blocking=True)

    def is_summed(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradients of ``parameter`` add up in float32 beside it."""
        narrow = torch.promote_types(parameter.dtype, torch.float32) != parameter.dtype
        return narrow and self.config.gradient_dtype == "float32"

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        if id(parameter) in self._sums:
            return self._sums[id(parameter)]
        return None if parameter.grad is None else local_tensor(parameter.grad)

    def _all(self, finite: Tensor) -> bool:
        wrong = int(not read_scalar(finite, True))
        return not wrong if self.parallel is None else self.parallel.mesh.agree(wrong) == 0

    def _made(self, parameter: Tensor) -> None:
        gradient = self._gradient(parameter)  # type: ignore[arg-type]
        if gradient is not None:
            self._note("gradients", gradient)

    def _add(self, parameter: Tensor) -> None:
        """Add a parameter's new gradient to its sum and free it."""
        assert parameter.grad is not None
        new = local_tensor(parameter.grad)
        if id(parameter) in self._sums:
            self._sums[id(parameter)] += new
        else:
            self._sums[id(parameter)] = new.float()
            self._note("gradients", self._sums[id(parameter)])
        parameter.grad = None


def _adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW, parameters grouped by how they are spread: tensors of two meshes cannot be updated at once."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((getattr(parameter, "device_mesh", None), parameter.dtype), []).append(parameter)
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()],
        lr=config.lr,
        betas=(beta1, beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _host_copy(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy of a parameter in host memory."""
    local = local_tensor(parameter.detach())
    return nn.Parameter(like(parameter, host_empty(local.shape, local.dtype).copy_(local)))


def _host_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return what AdamW would make for ``parameter`` in its first step, in host memory."""
    local = local_tensor(parameter.detach())
    moments = (like(parameter, host_empty(local.shape, local.dtype).zero_()) for _ in range(2))
    return dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True)) | {"step": host_empty((), torch.float32).zero_()}
