"""Count on fake tensors the memory that a third-party kernel allocates besides its results."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("longstraw::scratch", mutates_args=())
def scratch(like: Tensor, num_bytes: int) -> Tensor:
    """Return an empty tensor or, if tensors are fake, one of ``num_bytes`` on the device of ``like``.

    Kept alive during a call it accounts for memory that the call allocates and frees inside, which its fake version
    does not show.
    """
    return like.new_empty(0, dtype=torch.uint8)


@scratch.register_fake
def _(like: Tensor, num_bytes: int) -> Tensor:
    return like.new_empty(num_bytes, dtype=torch.uint8)


SCRATCH = torch.ops.longstraw.scratch.default  # as a dispatch mode sees it
