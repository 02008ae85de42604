"""Test cases that layers give the self-check: random inputs at their own widths, and the operation to compare.

A layer class with operations of its own has a method ``op_cases(draw, positions, rows)``; see ``longstraw.selfcheck``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longstraw.ops import Ops
from longstraw.state import Tensors

Case = tuple[str, Tensors, Callable[[Ops, Tensors], Tensors]]  # name, inputs, the operation under an implementation


class Draw:
    """Draws normal numbers, the same ones for the fused run and for the reference."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, wide: bool = False) -> Tensor:
        inner = torch.promote_types(self.dtype, torch.float32)
        drawn = torch.randn(shape, generator=self.generator, device=self.device, dtype=inner).mul_(scale)
        return drawn if wide else drawn.to(self.dtype)


def differentiated(inputs: Tensors, wanted: Sequence[str], call: Callable[[Tensors], Tensors]) -> Tensors:
    """Return the results of ``call`` and the gradients of the inputs ``wanted``, with drawn cotangents."""
    leaves = {key: x.detach().requires_grad_(key in wanted) for key, x in inputs.items()}
    results = call(leaves)
    cotangents = [_cotangent(x) for x in results.values()]
    gradients = torch.autograd.grad(
        list(results.values()), [leaves[key] for key in wanted], cotangents, materialize_grads=True
    )
    return results | {f"gradient of {key}": x for key, x in zip(wanted, gradients, strict=True)}


def _cotangent(like: Tensor) -> Tensor:
    """Return numbers that every dtype holds exactly."""
    return torch.arange(like.numel(), device=like.device).cos().bfloat16().to(like.dtype).view(like.shape)
