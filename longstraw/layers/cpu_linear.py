"""``nn.Linear`` for processors: products of bfloat16 numbers in float32, which is faster there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longstraw.ops.linear import linear


class WideLinear(nn.Linear):
    """``nn.Linear`` without bias that forms products of bfloat16 numbers in float32; see ``ops.linear``."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.bfloat16 and self.weight.dtype is torch.bfloat16:
            return linear(x, self.weight)
        return super().forward(x)


def widen(model: nn.Module) -> None:
    """Turn every ``nn.Linear`` of ``model`` without bias into a ``WideLinear``; names, weights and results stay."""
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None:
            module.__class__ = WideLinear
