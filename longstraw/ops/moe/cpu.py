"""The reference with matrix products of bfloat16 numbers in float32: see ``ops.linear`` for why."""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.ops.moe import reference


def experts_forward(
    x: Tensor, token: Tensor, weight: Tensor, counts: list[int], gate_up: Tensor, down: Tensor
) -> Tensor:
    """Return what ``reference.experts_forward`` does."""
    inner = torch.promote_types(x.dtype, torch.float32)
    return reference.experts_forward(x, token, weight, counts, gate_up, down, inner=inner)


def experts_backward(
    grad: Tensor,
    x: Tensor,
    token: Tensor,
    weight: Tensor,
    counts: list[int],
    gate_up: Tensor,
    down: Tensor,
    *,
    learnt: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return what ``reference.experts_backward`` does."""
    inner = torch.promote_types(x.dtype, torch.float32)
    return reference.experts_backward(grad, x, token, weight, counts, gate_up, down, learnt=learnt, inner=inner)
