"""Memory that an operator of foreign code takes beside its results, made visible where the code itself does not run."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("longstraw::scratch", mutates_args=())
def scratch(like: Tensor, num_bytes: int) -> Tensor:
    """Return an empty tensor; where tensors are fake, one of ``num_bytes`` on the device of ``like``.

    Held around a call, it counts what the call allocates and frees inside, which no fake version shows.
    """
    return like.new_empty(0, dtype=torch.uint8)


@scratch.register_fake
def _(like: Tensor, num_bytes: int) -> Tensor:
    return like.new_empty(num_bytes, dtype=torch.uint8)


SCRATCH = torch.ops.longstraw.scratch.default  # as a dispatch mode sees it
