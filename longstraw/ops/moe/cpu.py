"""The experts of ``reference``, but with matrix products of bfloat16 numbers in float32; ``ops.linear`` says why."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.ops.moe import reference
from longstraw.ops.moe.reference import ExpertGradients, Routed


def experts_forward(x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return what ``reference.experts_forward`` does."""
    return reference.experts_forward(x, routed, gate_up, down, inner=torch.promote_types(x.dtype, torch.float32))


def experts_backward(
    x: Tensor, routed: Routed, gate_up: Tensor, down: Tensor, grads: ExpertGradients
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return what ``reference.experts_backward`` does."""
    inner = torch.promote_types(x.dtype, torch.float32)
    return reference.experts_backward(x, routed, gate_up, down, grads, inner)
